"""Tests of what yields thresholds."""
