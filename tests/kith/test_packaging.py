"""The client installs without the server, with full types, beside a user's own modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import kith
from kith.wire import common
from models.runtime import network
from models.vision.liveness import LivenessVerdict
from tests.conftest import ROOT

pytestmark = pytest.mark.long

SCRIPT = """
import asyncio
import sys
from collections.abc import Iterator
from typing import assert_type

import models
import service
from kith import AsyncKith, Kith, KithUnreachableError
from kith.wire.identification import IdentifyOut
from kith.wire.subjects import SubjectOut


def use(kith: Kith) -> None:
    assert_type(kith.identify("g", b"photo", risk={"fpir": 0.001}, top_k=3), IdentifyOut)
    assert_type(kith.subjects("g", tags=["a"]), Iterator[SubjectOut])
    kith.create_gallery("g", rsk={"fpir": 0.001})  # type: ignore[call-arg]
    kith.identify("g", b"photo", risk={"fpr": 0.001})  # type: ignore[arg-type]


async def use_async(kith: AsyncKith) -> None:
    assert_type(await asyncio.create_task(kith.identify("g", b"photo")), IdentifyOut)


if __name__ == "__main__":
    assert models.OWNER == service.OWNER == "user"
    try:
        with Kith("http://127.0.0.1:9", attempts=1) as kith:
            use(kith)
    except KithUnreachableError:
        print("numpy" in sys.modules, "fastapi" in sys.modules)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a virtual environment that has only the client."""
    folder = tmp_path_factory.mktemp("client")
    shutil.copytree(ROOT / "kith", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = subprocess.run(
        [*uv, "pip", "install", "--python", python, folder / "source"], capture_output=True, text=True, timeout=300
    )
    if install.returncode and any(sign in install.stderr for sign in ("Failed to fetch", "request", "connect")):
        pytest.skip(f"no package index is reachable: {install.stderr.strip().splitlines()[-1]}")
    assert install.returncode == 0, install.stderr
    return python


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a user's script, beside modules that have the names of server packages."""
    (tmp_path / "models.py").write_text('OWNER = "user"\n')
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text('OWNER = "user"\n')
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def test_mypy_sees_full_types_outside_of_the_repository(python: Path, script: Path) -> None:
    checker = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), script.name]
    checked = subprocess.run(checker, cwd=script.parent, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_script_runs_beside_modules_named_models_and_service(python: Path, script: Path) -> None:
    done = subprocess.run([python, script.name], cwd=script.parent, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_both_distributions_have_one_version_and_one_python() -> None:
    server, client = (
        tomllib.loads(file.read_text())["project"]
        for file in (ROOT / "pyproject.toml", ROOT / "kith" / "pyproject.toml")
    )
    for key in ("version", "requires-python", "license"):
        assert server[key] == client[key]
    assert set(client["dependencies"]) <= set(server["dependencies"])


def test_every_public_name_is_found() -> None:
    assert all(getattr(kith, name) is not None for name in kith.__all__)
    with pytest.raises(ImportError, match="Kin"):
        exec("from kith import Kin")  # noqa: S102 - as a caller writes it


def test_literal_types_have_the_same_values_on_both_sides() -> None:
    pairs = ((common.Engine, network.Engine), (common.Precision, network.Precision), (common.Verdict, LivenessVerdict))
    assert all(get_args(wire) == get_args(model) for wire, model in pairs)
