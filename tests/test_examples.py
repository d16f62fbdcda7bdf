"""Examples of the documents run unchanged against real servers, in order."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, chdir, redirect_stdout
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
from tests.commands import run_kith
from tests.conftest import ROOT, is_eventually, is_ready
from tests.faults.servers import free_port
from tests.packs import projected_pack

SERVER = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000")
OPERATOR = "of the tests, and long enough for one"


def blocks(document: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


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
    done = subprocess.run([*words, text], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def run_python(text: str, folder: Path) -> str:
    """Run a program here, which saves the imports of a process. Warnings are errors."""
    with chdir(folder), redirect_stdout(io.StringIO()) as printed:
        exec(text, {"__name__": "__main__"})  # noqa: S102
    return printed.getvalue()


def test_programs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run docs/client.md against a server with API keys."""
    settings = load_settings(data_dir=tmp_path_factory.mktemp("examples"), api_key=OPERATOR, log_level="WARNING")
    with embedded(settings) as url:

        def written(kind: str) -> list[str]:
            return [SERVER.sub(url, text).replace("KEY", OPERATOR) for text in blocks("docs/client.md", kind)]

        first, embedding, files, awaited = (run_python(text, photos) for text in written("python"))
        assert len(first.splitlines()) == 6 + 2
        assert "\nsame\nseveral_faces: " in first
        dimension, norm, found = embedding.split()
        assert (int(dimension), found) == (load_pack(BUNDLED_PACK).recognition.dimension, "ada")
        assert float(norm) == pytest.approx(1, abs=1e-5)
        assert "succeeded" in files
        assert awaited.startswith("one.jpg ['identified']\ntwo.jpg ['identified']\nparty.jpg [")
        driver = pytest.importorskip("playwright._impl._driver", reason="Playwright, which brings Node, is missing")
        (script,) = written("js")
        command = [driver.compute_driver_executable()[0], "--input-type=module", "--eval"]
        assert "\nseveral_faces " in run(command, photos, script)


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
    texts = blocks("docs/rest.md", "sh")
    texts.insert(0, next(text for text in texts if '"name": "staff"' in text))
    commands = [one for text in texts for one in re.split(r"\n(?=\S)", text.replace("\\\n", " ").strip())]
    calls = [one for one in dict.fromkeys(commands) if not one.startswith("kith ")]  # tests/service has the commands
    assert len(calls) >= 25
    known: dict[str, str] = {}
    """Ids for which the text has placeholders."""
    with Kith(moving) as kith:
        for command in calls:
            assert command.startswith("curl -s "), command
            if "5f0c" in command:
                kith.put_subject("staff", "countess")
                known["5f0c..."] = next(kith.templates("staff", "ada")).id
            if "/migrate" in command:  # enrollment ends before it starts, and embedding before the next command
                for job in kith.jobs("staff"):
                    kith.wait_for(job.id, 60)
            for placeholder, own in known.items():
                command = command.replace(placeholder, own)
            command = SERVER.sub(moving, command.replace("curl ", "curl --fail-with-body ", 1))
            said = run(["bash", "-euc"], photos, command)
            if '"name": "staff"' in command:
                kith.update_gallery("staff", keep_crops=True)
            if "/enrollments" in command:
                (known["7c1e..."],) = re.findall(r'"id":"(\w+)"', said)[:1]
        assert {"5f0c...", "7c1e..."} <= known.keys()
        assert "copy" in kith.gallery_names()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_container_names_a_face(tmp_path: Path) -> None:
    """Start it twice: the key stays. The service runs here instead of in a container."""
    starting, asking = (text for text in blocks("README.md", "sh") if "docker/.env" in text)
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
    assert said.count('"outcome":"identified"') == said.count('"outcome":"identified","subject":"eileen"') == 1
    assert (tmp_path / "docker" / ".env").read_text() == file


def test_the_readmes(photos: Path, server: str) -> None:
    for text in blocks("README.md", "python"):
        assert len(run_python(SERVER.sub(server, text), photos).splitlines()) == 6
    httpx.delete(f"{server}/v1/galleries/family")


TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(sh|text|python)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Write a command kith that finds the packages of make demo only, and return its environment."""
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
    (folder / "kith").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m service.cli.entry "$@"\n')
    (folder / "kith").chmod(0o755)
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{folder}:{ROOT}"}


def test_the_tutorial(tmp_path: Path, installed: dict[str, str]) -> None:
    """The demo and the service run with its packages only, the other commands here, which saves their imports."""
    port, folder, printed = free_port(), tmp_path / "demo-output", ""
    environment = installed | {"KITH_RUNTIME": "onnxruntime", "KITH_PORT": str(port)}
    kith = tmp_path / ".venv" / "bin" / "kith"
    with ExitStack() as stack:
        for kind, block in BLOCKS:
            block = block.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            if kind == "text":
                lines = iter(printed.splitlines())
                for line in block.splitlines():
                    assert any(pattern(line).fullmatch(each.strip()) for each in lines), line
            elif kind == "python":
                printed = run_python(block, folder)
            elif block == "make demo\n":
                demo = subprocess.run([kith, "demo"], cwd=tmp_path, env=environment, capture_output=True, text=True)
                assert demo.returncode == 0, demo.stderr
                printed = demo.stdout
            elif "kith serve" in block:
                server = stack.enter_context(subprocess.Popen([kith, "serve"], cwd=folder, env=environment))
                stack.callback(server.terminate)
                is_eventually(lambda: is_ready(f"http://127.0.0.1:{port}"))
            elif "KITH_URL" in block:
                (environment["KITH_URL"],) = re.findall(r"KITH_URL=(\S+)", block)
            else:
                for line in block.splitlines():
                    done = run_kith(*shlex.split(line)[1:], cwd=folder, environment=environment)
                    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                    printed = done.stdout
    assert (folder / "who" / "party.jpg").stat().st_size > 10_000


def pattern(line: str) -> re.Pattern[str]:
    """Match a shown line, whatever its spacing and the digits in place of each ellipsis."""
    return re.compile(r"\s+".join(re.escape(word).replace("…", r"[\d.]+") for word in line.split()))
