"""A tally of the kills, printed when all is done."""

from __future__ import annotations

import pytest

from tests.faults.tally import Tally

TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[TALLY]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[TALLY].lines():
        terminalreporter.write_line(line)
