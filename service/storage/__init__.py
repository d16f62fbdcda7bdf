"""Galleries: who is enrolled, on disk and searchable."""
