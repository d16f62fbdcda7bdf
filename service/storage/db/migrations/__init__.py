"""Alembic migrations of the gallery database."""
