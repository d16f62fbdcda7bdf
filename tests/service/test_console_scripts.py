"""What the console's pages count and say, tested as the browser runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from playwright._impl._driver import compute_driver_executable  # its wheel brings a node, and says where here alone

HERE = Path(__file__).parents[1] / "console"


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_script(file: str) -> None:
    node, _ = compute_driver_executable()
    answer = subprocess.run([node, "--test", file], cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
