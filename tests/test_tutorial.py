"""The tutorial's commands run in order with the packages that make demo installs, and print what the tutorial shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, is_eventually, is_ready
from tests.faults.servers import free_port

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
