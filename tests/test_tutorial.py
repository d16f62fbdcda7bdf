"""The tutorial's commands run in order against a real server and print the documented output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kith import Kith
from tests.conftest import ROOT

SKIPPED = re.compile(r"make |kith serve|export |mkdir |cd ")
BLOCK = re.compile(r"^```(sh|text|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Run ``kith`` and ``python`` from this environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("kith", f'"{sys.executable}" -m service.cli.main'), ("python", f'"{sys.executable}"')):
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def words(line: str) -> list[str]:
    """Split a line, without numbers whose rounding depends on the processor."""
    return re.sub(r"\d\.\d+", "#", line).split()


def test_the_tutorial(tmp_path: Path, programs: Path, server: str, kith: Kith) -> None:
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KITH_URL": server,
        "COLUMNS": "120",
    }
    answered: list[list[str]] = []
    ran = 0
    for kind, block in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if kind == "text":
            for line in block.splitlines():
                expected = words(line)[:4]
                assert any(found[: len(expected)] == expected for found in answered), line
            continue
        if kind == "python":
            block = "python - <<'END'\n" + block.replace("http://127.0.0.1:8000", server) + "END\n"
        elif all(SKIPPED.match(line) for line in block.splitlines()):
            continue
        done = subprocess.run(
            ["bash", "-euc", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{block}{done.stderr}"
        answered = [words(line) for line in done.stdout.splitlines()]
        ran += 1
    assert ran >= 9
    assert (tmp_path / "who" / "party.jpg").stat().st_size > 10_000
    assert (tmp_path / "risk.png").exists()
    kith.delete_gallery("family")
