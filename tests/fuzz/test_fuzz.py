"""What reads bytes of others ends in a result or a documented error: of every file that was a finding once, and of some
thousands made up from good ones. ``make fuzz`` goes on for longer."""

from __future__ import annotations

import base64
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fuzz.targets import ALL, TARGETS

CASES = sorted((Path(__file__).parent / "cases").glob("*.b64"))
RUNS = 2000


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_what_was_found_once(case: Path) -> None:
    """Named TARGET-WHAT.b64."""
    TARGETS[case.stem.partition("-")[0]].run(base64.b64decode(case.read_text()))


@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_read(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: Linux alone has it")
def test_made_up_files(tmp_path: Path) -> None:
    """Of all kinds in one process, which takes longer to start than to read them."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(ALL.seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = ["-seed=1", f"-runs={RUNS}", "-timeout=10", "-max_len=20000", f"-artifact_prefix={tmp_path}/"]
    # From a shell's fork: a process begun from this one is counted the most memory this one ever had, which a whole run
    # of the tests takes beyond what libFuzzer allows.
    afresh = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*afresh, sys.executable, "-W", "ignore", "-m", "tests.fuzz", "all", *options, str(corpus)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
