"""A TypeScript client generated from the OpenAPI document compiles and works, with generators from npm."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import jpeg

HERE = Path(__file__).parent / "typescript"
TIMEOUT_S = 120


def run(*words: str, folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Folder with generator and compiler. Skips if node or npm is missing, or the packages cannot be fetched."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    for file in HERE.iterdir():
        shutil.copy(file, tmp_path)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip("npm cannot fetch the packages in time")
    if done.returncode:
        pytest.skip(f"npm cannot fetch the packages: {done.stderr[-200:]}")
    return tmp_path


@pytest.mark.long
def test_a_generated_client_compiles_and_works(
    installed: Path, server: str, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    (installed / "openapi.json").write_text(httpx.get(f"{server}/openapi.json").text)
    (installed / "ada.jpg").write_bytes(jpeg(astronaut))
    run("npm", "exec", "--no", "--", "openapi-typescript", "openapi.json", "-o", "kith.d.ts", folder=installed)
    run("npm", "exec", "--no", "--", "tsc", "--project", ".", folder=installed)
    answers = json.loads(run("node", "session.js", server, f"{gallery[:50]}-ts", "ada.jpg", folder=installed))
    assert answers == {"outcomes": ["identified"], "missing": "gallery_not_found"}
