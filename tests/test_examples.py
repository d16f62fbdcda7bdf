"""Examples of the documents run unchanged against real servers, in order."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from packaging.utils import canonicalize_name
from PIL import Image

from kith import Kith
from models.pack.loading import BUNDLED_PACK, load_pack
from service.server import embedded
from service.settings import load_settings
from tests.conftest import ROOT, is_eventually, is_ready
from tests.faults.servers import free_port
from tests.packs import projected_pack

BLOCK = re.compile(r"^```(python|js|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
OPERATOR = "of the tests, and long enough for one"


def blocks(document: str, *kinds: str) -> list[tuple[str, str]]:
    found = BLOCK.findall((ROOT / document).read_text())
    return [(kind, text) for kind, text in found if kind in kinds]


def node() -> str | None:
    """Return the program on the PATH, or the one that Playwright brings."""
    found = shutil.which("node")
    spec = importlib.util.find_spec("playwright")
    if found is None and spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "driver" / "node"
        found = str(own) if own.exists() else None
    return found


@pytest.fixture
def photos(tmp_path: Path, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], group: NDArray[np.uint8]) -> Path:
    """Create photos with the file names of the documents."""
    for name, pixels in {"ada": astronaut, "one": astronaut, "two": actor, "stranger": actor, "party": group}.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg", quality=92)
    with zipfile.ZipFile(tmp_path / "people.zip", "w") as archive:
        archive.write(tmp_path / "one.jpg", "ada/1.jpg")
        archive.write(tmp_path / "party.jpg", "nobody/1.jpg")
    return tmp_path


def run(words: list[str], folder: Path, text: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, text], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_programs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run docs/client.md against a server with API keys."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("examples"), api_key=OPERATOR, log_level="WARNING")
    said: dict[str, list[str]] = {"python": [], "js": [], "sh": []}
    with embedded(settings) as url:
        programs = {
            "python": [sys.executable, "-W", "error", "-c"],
            "js": [node() or "", "--input-type=module", "--eval"],
            "sh": [shutil.which("bash") or "", "-euc"],
        }
        for kind, text in blocks("docs/client.md", *programs):
            if not programs[kind][0] or (kind == "sh" and shutil.which("curl") is None):
                continue
            text = SERVER.sub(url, text).replace("KEY", OPERATOR)
            said[kind].append(run(programs[kind], photos, text))
    first, embedding, files, awaited = said["python"]
    assert len(first.splitlines()) == 6 + 2
    assert "\nsame\nseveral_faces: " in first
    dimension, _ = embedding.split("\n")[0].split()
    assert (int(dimension), embedding.split("\n")[1]) == (load_pack(BUNDLED_PACK).recognition.dimension, "ada")
    assert "succeeded" in files
    assert awaited.startswith("one.jpg ['identified']\ntwo.jpg ['identified']\nparty.jpg [")
    if node() is None:
        pytest.skip("neither node nor Playwright's is there: the JavaScript was not run")
    (script,) = said["js"]
    assert "\nseveral_faces " in script


@pytest.fixture
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without API keys that serves a second pack, under the name used in the documents."""
    folder = tmp_path_factory.mktemp("moving")
    other = projected_pack(folder, "open-model-zoo", load_pack(BUNDLED_PACK).recognition.dimension)
    settings = load_settings(data_dir=folder / "data", extra_packs=str(other.directory), log_level="WARNING")
    with embedded(settings) as url:
        yield url


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_rest_by_example(photos: Path, moving: str) -> None:
    """Run docs/rest.md. The gallery is created first, because some examples precede its creation."""
    texts = [text for _, text in blocks("docs/rest.md", "sh")]
    creating = next(text for text in texts if '"name": "staff"' in text)
    commands = [one for text in [creating, *texts] for one in re.split(r"\n(?=\S)", text.replace("\\\n", " ").strip())]
    known: dict[str, str] = {}
    with Kith(moving) as kith:
        ran = 0
        for command in dict.fromkeys(commands):
            if command.startswith("kith "):  # tests/service has the commands
                continue
            assert command.startswith("curl -s "), command
            prepare(kith, command, known)
            for written, meant in known.items():
                command = command.replace(written, meant)
            said = run(
                ["bash", "-euc"], photos, SERVER.sub(moving, command.replace("curl ", "curl --fail-with-body ", 1))
            )
            ran += 1
            learn(kith, command, said, known)
        assert ran >= 25
        assert {"5f0c...", "7c1e..."} <= known.keys()
        assert "copy" in kith.gallery_names()


def prepare(kith: Kith, command: str, known: dict[str, str]) -> None:
    """Create the state that the text assumes before this command."""
    if "5f0c" in command:
        kith.put_subject("staff", "countess")
        known["5f0c..."] = next(kith.templates("staff", "ada")).id
    if "/migrate" in command:  # enrollment ends before the migration starts, and embedding ends before the next command
        for job in kith.jobs("staff"):
            kith.wait_for(job.id, 60)


def learn(kith: Kith, command: str, said: str, known: dict[str, str]) -> None:
    """Record the ids for which the text has placeholders in later commands."""
    if '"name": "staff"' in command:
        kith.update_gallery("staff", keep_crops=True)
    elif "/enrollments" in command:
        known["7c1e..."] = re.findall(r'"id":"(\w+)"', said)[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_container_names_a_face(tmp_path: Path) -> None:
    """Start it twice: the key stays. The service runs here instead of in a container."""
    starting, asking = (text for _, text in blocks("README.md", "sh") if "docker/.env" in text)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    asked = [run(["bash", "-euc"], tmp_path, f"docker() {{ echo $*; }}\n{starting}") for _ in range(2)]
    assert "run --detach --init --name kith " in asked[0]
    file = (tmp_path / "docker" / ".env").read_text()
    (key,) = re.findall(r"KITH_API_KEY=([0-9a-f]{64})\n", file)
    settings = load_settings(data_dir=tmp_path / "data", api_key=key, log_level="WARNING")
    with embedded(settings) as url:
        said = run(["bash", "-euc"], tmp_path, SERVER.sub(url, asking))
        with Kith(url, key) as kith:
            assert kith.gallery("crew").subject_count == 1
    assert said.count('"outcome":') == said.count('"outcome":"identified","subject":"eileen"') == 1
    assert (tmp_path / "docker" / ".env").read_text() == file


def test_the_readmes(photos: Path, server: str) -> None:
    with httpx.Client(base_url=server) as client:
        for _, text in blocks("README.md", "python"):
            said = run([sys.executable, "-W", "error", "-c"], photos, SERVER.sub(server, text))
            assert len(said.splitlines()) == 6
        client.delete("/v1/galleries/family")


TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(sh|text|python)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
STAYS = re.compile(r"(?:export|cd) .*\n", re.MULTILINE)
"""Lines that the terminal remembers for later blocks."""
CHOSEN = {"0.1", "0.01", "0.001", "0.0001", "3.11"}
"""FPIRs, and the version of Python."""


def test_no_shown_number_depends_on_the_processor() -> None:
    assert set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d….])", TUTORIAL)) == CHOSEN


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Write programs to .venv/bin that find the packages of make demo only, and return their environment."""
    there = {line.partition("==")[0] for line in (ROOT / "requirements" / "serve.txt").read_text().splitlines()}
    there |= {"kith-face", "scikit-image", "insightface", "pip", "setuptools"}
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not there & {canonicalize_name(owner) for owner in owners}
    ]
    assert {"matplotlib", "torch", "pytest"} <= set(hidden)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    for name, words in (("kith", f'"{sys.executable}" -m service.cli.entry'), ("python", f'"{sys.executable}"')):
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{folder}:{ROOT}"}


def test_the_tutorial(tmp_path: Path, installed: dict[str, str]) -> None:
    port = free_port()
    environment = installed | {"KITH_RUNTIME": "openvino", "KITH_PORT": str(port)}
    remembered = ""
    printed: Iterator[str] = iter(())
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for kind, block in BLOCKS:
            block = block.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("make demo", ".venv/bin/kith demo")
            if kind == "text":
                for line in block.splitlines():
                    assert any(pattern(line).fullmatch(each.strip()) for each in printed), line
            elif "kith serve" in block:
                words = ["/bin/bash", "-euc", block]
                servers.append(subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True))
                is_eventually(lambda: is_ready(f"http://127.0.0.1:{port}"))
            else:
                command = block if kind == "sh" else f"python - <<'END'\n{block}END\n"
                words = ["/bin/bash", "-euc", remembered + command]
                done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}"
                remembered += "".join(STAYS.findall(block))
                printed = iter(done.stdout.splitlines())
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
    assert (tmp_path / "demo-output" / "who" / "party.jpg").stat().st_size > 10_000


def pattern(line: str) -> re.Pattern[str]:
    """Match a shown line, whatever its spacing and the digits in place of each ellipsis."""
    return re.compile(r"\s+".join(re.escape(word).replace("…", r"[\d.]+") for word in line.split()))
