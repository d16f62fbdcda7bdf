"""Fixtures of the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import url_maker
from tests.faults import LONG
from tests.postgres import DatabaseUrl


@pytest.fixture(params=["sqlite", "postgresql"] if LONG else ["sqlite"])
def some_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty SQLite databases; of PostgreSQL too with KITH_FAULTS=long."""
    return url_maker(request, tmp_path)
