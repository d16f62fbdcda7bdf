"""Program `.ci/pytest`, which `.ci/run` calls in place of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAKY = """
from pathlib import Path

def test_flaky():
    seen = Path("seen")
    there = seen.exists()
    seen.touch()
    assert there

def test_stable():
    with Path("runs").open("a") as runs:
        runs.write("x")
"""


@pytest.mark.parametrize(
    ("tests", "status", "printed"),
    [
        ("def test_stable(): pass", 0, ""),
        (FLAKY, 0, "FLAKY, failed first and passed when repeated:\n  test_them.py::test_flaky\n"),
        (FLAKY + "\ndef test_broken():\n    assert 0", 1, "FAILED TWICE:\n  test_them.py::test_broken\n"),
        (FLAKY + "\n1 / 0", 2, ""),
    ],
    ids=["stable", "flaky", "broken", "not collected"],
)
def test_failed_tests_run_once_more(tmp_path: Path, tests: str, status: int, printed: str) -> None:
    pytest_of_tests = tmp_path / ".venv" / "bin" / "pytest"
    pytest_of_tests.parent.mkdir(parents=True)
    pytest_of_tests.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest "$@"\n')
    pytest_of_tests.chmod(0o755)
    (tmp_path / "test_them.py").write_text(tests)
    (tmp_path / "pytest.ini").touch()
    done = subprocess.run(
        [ROOT / ".ci" / "pytest", "-m", "not long"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert printed in done.stderr
    assert printed or not done.stderr
    if printed:
        assert (tmp_path / "runs").read_text() == "x", "tests that passed are not repeated"
