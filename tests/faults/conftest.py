"""Fixtures of the fault tests, with a tally of kills at the end of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import url_maker
from tests.faults import LONG
from tests.faults.tally import Tally
from tests.postgres import DatabaseUrl

TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[TALLY]


@pytest.fixture(params=["sqlite", "postgresql"] if LONG else ["sqlite"])
def some_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty SQLite databases; of PostgreSQL too with KITH_FAULTS=long."""
    return url_maker(request, tmp_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[TALLY].lines():
        terminalreporter.write_line(line)
