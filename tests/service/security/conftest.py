"""Fixtures of the tests of security: PostgreSQL repeats what it does in another way, as in the storage tests."""

from __future__ import annotations

from tests.service.storage.conftest import database_url

__all__ = ["database_url"]
