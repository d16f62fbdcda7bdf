"""Parsers of untrusted bytes return a result or a documented error, for former findings and thousands of mutated
files. ``make fuzz`` runs longer.
"""

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
def test_former_findings(case: Path) -> None:
    """Replay a former finding. Files are named TARGET-DESCRIPTION.b64."""
    TARGETS[case.stem.partition("-")[0]].run(base64.b64decode(case.read_text()))


@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_read(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: Linux alone has it")
def test_made_up_files(tmp_path: Path) -> None:
    """Run all targets in one process, because startup takes longer than the inputs."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(ALL.seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = ["-seed=1", f"-runs={RUNS}", "-timeout=10", "-max_len=20000", f"-artifact_prefix={tmp_path}/"]
    # Start from a shell's fork: a direct child inherits this process's peak memory, which a full test run raises
    # above libFuzzer's limit.
    afresh = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*afresh, sys.executable, "-W", "ignore", "-m", "tests.fuzz", "all", *options, str(corpus)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
