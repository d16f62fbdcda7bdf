"""The files of a release are complete and work outside of the repository, and CI repeats failed tests once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from requirements import release
from tests.conftest import ROOT, jpeg

PACKAGES = ("kith", "models", "service", "training")
UNPACKAGED = {"kith/pyproject.toml", "service/storage/db/migrations/script.py.mako"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built from a git repository")
    target = tmp_path_factory.mktemp("release") / "dist"
    release.build(target)
    return target


def committed(*folders: str) -> set[str]:
    command = ["git", "ls-tree", "-r", "--name-only", "HEAD", *folders]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_packages(built: Path) -> None:
    (wheel,) = built.glob("kith_face-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == committed(*PACKAGES) - UNPACKAGED


@pytest.mark.long
def test_hashes_bill_and_provenance_match_the_files(built: Path) -> None:
    lines = [line.split("  ") for line in (built / "SHA256SUMS").read_text().splitlines()]
    digests = {name: digest for digest, name in lines}
    assert sum(name.endswith((".whl", ".tar.gz")) for name in digests) == 4
    assert {file.name for file in built.iterdir()} == {*digests, "SHA256SUMS", "provenance.json"}
    assert {name: release._digest(built / name) for name in digests} == digests
    statement = json.loads((built / "provenance.json").read_text())
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == digests
    assert json.loads((built / "sbom.json").read_text())["components"]


@pytest.mark.long
def test_the_built_wheel_works_in_a_fresh_environment(
    built: Path, tmp_path: Path, astronaut: NDArray[np.uint8]
) -> None:
    """The dependencies come from this environment: without an index, only the wheel itself is installed."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = built.glob("kith_face-*.whl")
    install = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--no-deps", "--offline", "--python"]
    subprocess.run([*install, python, wheel], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    kith = tmp_path / "venv" / "bin" / "kith"
    (tmp_path / "ada.jpg").write_bytes(jpeg(astronaut))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [kith, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    located = subprocess.run(
        [python, "-c", "import service; print(service.__file__)"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert located.stdout.decode().startswith(str(packages))
    assert run("--version") == f"kith {release.version(ROOT)}\n"
    run("gallery", "create", "staff")
    run("subject", "enroll", "ada", "ada.jpg", "-g", "staff")
    assert "ada" in run("identify", "ada.jpg", "-g", "staff")


def test_each_step_of_a_release_is_found_until_it_is_done(tmp_path: Path) -> None:
    for name in ("CHANGELOG.md", "pyproject.toml", "kith/pyproject.toml", "docker/kubernetes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, tmp_path / name], check=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    number = release.version(ROOT)
    final = number.removesuffix(".dev0")
    projects = ["pyproject.toml", "kith/pyproject.toml"]
    tags = [f"docker/kubernetes/{kind}/kustomization.yaml" for kind in ("one", "scale")]
    steps = [
        (projects, f'version = "{number}"', f'version = "{final}"'),
        (projects, '    "Private :: Do Not Upload",\n', ""),
        (["CHANGELOG.md"], f"## {final} (unreleased)", f"## {final} (2026-12-01)"),
        (tags, f'"{number}"', f'"{final}"'),
    ]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    left = [len(release.steps_left(tmp_path))]
    for files, old, new in steps:
        for file in files:
            (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
        left.append(len(release.steps_left(tmp_path)))
    assert left == [4, 4, 3, 2, 1] or number == final
    subprocess.run([*git, "tag", f"v{final}"], cwd=tmp_path, check=True)
    assert release.steps_left(tmp_path) == []


TESTS = """
from pathlib import Path

def test_flaky():
    there = Path("seen").exists()
    Path("seen").touch()
    assert there

def test_stable():
    with Path("runs").open("a") as runs:
        runs.write("x")
"""


@pytest.mark.parametrize(
    ("further", "status", "printed"),
    [
        ("", 0, "FLAKY, failed first and passed when repeated:\n  test_them.py::test_flaky\n"),
        ("def test_broken():\n    assert 0", 1, "FAILED TWICE:\n  test_them.py::test_broken\n"),
        ("1 / 0", 2, ""),
    ],
    ids=["flaky", "broken", "not collected"],
)
def test_failed_tests_run_once_more(tmp_path: Path, further: str, status: int, printed: str) -> None:
    program = tmp_path / ".venv" / "bin" / "pytest"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest "$@"\n')
    program.chmod(0o755)
    (tmp_path / "test_them.py").write_text(TESTS + further)
    (tmp_path / "pytest.ini").touch()
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [str(ROOT / ".ci" / "pytest"), "-m", "not long"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert printed in done.stderr
    if printed:
        assert (tmp_path / "runs").read_text() == "x", "tests that passed are not repeated"
    else:
        assert not done.stderr
