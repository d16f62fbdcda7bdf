"""Runs from top to bottom: training, comparison, reports."""
