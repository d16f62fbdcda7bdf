"""Parsers of untrusted bytes return a result or a documented error, for valid files and thousands of mutated ones.
``make fuzz`` runs longer.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUNS = 2000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: Linux alone has it")
def test_made_up_files(tmp_path: Path) -> None:
    """Run all targets in one process, because startup takes longer than the inputs."""
    options = ["-seed=1", f"-runs={RUNS}", "-timeout=10", "-max_len=20000", f"-artifact_prefix={tmp_path}/"]
    # Start from a shell's fork: a direct child inherits this process's peak memory, which a full test run raises
    # above libFuzzer's limit.
    afresh = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*afresh, sys.executable, "-W", "ignore", "-m", "tests.fuzz", "all", *options, str(tmp_path / "corpus")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
