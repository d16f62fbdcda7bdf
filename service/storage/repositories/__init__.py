"""Repositories: reads and writes of one resource each."""
