"""A Go client generated from the OpenAPI document compiles and works, with generator, Java and Go from PyPI."""

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

HERE = Path(__file__).parent / "go"
TIMEOUT_S = 600


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Folder with the packages of requirements.txt. Skips if they cannot be fetched for this platform."""
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary", ":all:", "--require-hashes", "--target", str(packages)]
    pip += ["--requirement", str(HERE / "requirements.txt")]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip("pip cannot fetch the packages in time")
    if done.returncode:
        pytest.skip(f"pip cannot fetch the packages: {done.stderr[-200:]}")
    return packages


@pytest.mark.long
def test_a_generated_client_compiles_and_works(
    tools: Path, tmp_path: Path, server: str, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    (tmp_path / "openapi.json").write_text(httpx.get(f"{server}/openapi.json").text)
    (tmp_path / "ada.jpg").write_bytes(jpeg(astronaut))
    shutil.copy(HERE / "session.go", tmp_path)
    (tmp_path / "go.mod").write_text("module example.com/session\n\ngo 1.23\n")
    parts = "--global-property=apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
    generate: list[str | Path] = [tools / "bin" / "openapi-generator-cli", "generate", "-g", "go", "-i", "openapi.json"]
    options = ["-o", "kith", "--additional-properties=packageName=kith,withGoMod=false", parts]
    run(*generate, *options, folder=tmp_path, PYTHONPATH=str(tools))
    offline = {
        "PYTHONPATH": str(tools),
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-mod=mod",
        "GOCACHE": str(tmp_path / "cache"),
    }
    run(tools / "bin" / "go", "build", "-o", "session", "session.go", folder=tmp_path, **offline)
    answers = json.loads(run(tmp_path / "session", server, f"{gallery[:50]}-go", "ada.jpg", folder=tmp_path))
    assert answers == {"outcomes": ["identified"], "missing": "gallery_not_found"}
