"""Clients generated from the OpenAPI document compile and work: Go with a generator, Java and Go from PyPI, and
TypeScript with generators from npm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import jpeg

HERE = Path(__file__).parent
TIMEOUT_S = 600
FETCH_TIMEOUT_S = 120
ANSWERS = {"outcomes": ["identified"], "missing": "gallery_not_found"}
pytestmark = pytest.mark.long


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetched(*words: str | Path, folder: Path) -> None:
    """Fetch packages. Skips if they cannot be fetched for this platform."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{words[0]} cannot fetch the packages in time")
    if done.returncode:
        pytest.skip(f"{words[0]} cannot fetch the packages: {done.stderr[-200:]}")


@pytest.fixture
def place(tmp_path: Path, server: str, astronaut: NDArray[np.uint8]) -> Path:
    """Folder with the document and a photo."""
    (tmp_path / "openapi.json").write_text(httpx.get(f"{server}/openapi.json").text)
    (tmp_path / "ada.jpg").write_bytes(jpeg(astronaut))
    return tmp_path


def test_go(place: Path, server: str, gallery: str) -> None:
    tools = place / "packages"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", tools, "--requirement"]
    fetched(*pip, HERE / "go" / "requirements.txt", folder=place)
    shutil.copy(HERE / "go" / "session.go", place)
    (place / "go.mod").write_text("module example.com/session\n\ngo 1.23\n")
    parts = "--global-property=apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
    generate: list[str | Path] = [tools / "bin" / "openapi-generator-cli", "generate", "-g", "go", "-i", "openapi.json"]
    options = ["-o", "kith", "--additional-properties=packageName=kith,withGoMod=false", parts]
    run(*generate, *options, folder=place, PYTHONPATH=str(tools))
    offline = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod", "GOCACHE": str(place / "cache")}
    build: list[str | Path] = [tools / "bin" / "go", "build", "-o", "session", "session.go"]
    run(*build, folder=place, PYTHONPATH=str(tools), **offline)
    assert json.loads(run(place / "session", server, f"{gallery[:50]}-go", "ada.jpg", folder=place)) == ANSWERS


def test_typescript(place: Path, server: str, gallery: str) -> None:
    for file in (HERE / "typescript").iterdir():
        shutil.copy(file, place)
    fetched("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=place)
    run("npm", "exec", "--no", "--", "openapi-typescript", "openapi.json", "-o", "kith.d.ts", folder=place)
    run("npm", "exec", "--no", "--", "tsc", "--project", ".", folder=place)
    answers = run("node", "session.js", server, f"{gallery[:50]}-ts", "ada.jpg", folder=place)
    assert json.loads(answers) == ANSWERS
