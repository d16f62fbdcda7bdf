"""Consistency checks and repairs."""
