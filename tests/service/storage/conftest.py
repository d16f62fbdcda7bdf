"""Fixtures of the storage tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import url_maker
from tests.postgres import DatabaseUrl


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty databases. PostgreSQL repeats everything in the long tests, and before that only what it does in
    another way: tests that are marked ON_BOTH.
    """
    return url_maker(request, tmp_path)
