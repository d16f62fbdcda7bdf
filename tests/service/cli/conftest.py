"""Command ``kith`` with a server or the local database, and photos for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.commands import run_kith
from tests.conftest import ROOT, jpeg


class Program:
    """Command in a folder. ``stderr``: of the last call."""

    stderr: str

    def __init__(self, folder: Path, server: str | None) -> None:
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "KITH_LOG_LEVEL": "WARNING", "COLUMNS": "200"}
        self.environment |= {} if server is None else {"KITH_URL": server}

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a process, for tests of signals and streams."""
        command = [sys.executable, "-m", "service.cli.entry", *map(str, words)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **streams)

    def __call__(self, *words: str | Path, status: int = 0, stdin: str = "", **environment: str) -> str:
        done = run_kith(*map(str, words), cwd=self.folder, environment=self.environment | environment, stdin=stdin)
        self.stderr = done.stderr
        assert done.returncode == status, (words, done.stdout, self.stderr)
        assert "Traceback" not in self.stderr
        return done.stdout


def written(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, and the folders they are in."""
    for name, payload in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(payload)


@pytest.fixture
def run(tmp_path: Path, server: str) -> Program:
    return Program(tmp_path, server)


@pytest.fixture
def local(tmp_path: Path) -> Program:
    """Without KITH_URL."""
    return Program(tmp_path, None)


@pytest.fixture
def photos(
    tmp_path: Path, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> dict[str, Path]:
    taken = {"eileen": astronaut, "again": astronaut[:, ::-1], "tom": actor, "coffee": nobody}
    for name, photo in taken.items():
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(photo))
    (tmp_path / "text.jpg").write_text("no photo")
    return {path.stem: path for path in tmp_path.glob("*.jpg")}
