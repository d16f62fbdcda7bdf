"""Command line of Kith."""
