"""Generators of documents."""
