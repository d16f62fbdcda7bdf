"""Time the first steps of a new user in an empty home directory.

The steps are clone, ``make setup``, ``make demo``, a server, the first people enrolled, and the first face identified.
Writes docs/newcomer.md. Needs a package index, some gigabytes of disk, and minutes."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2 as httpx

from bench.common import ROOT
from bench.machine import commit, machine

TARGET: Final = ROOT / "docs" / "newcomer.md"
READY_S: Final = 120.0
PIP_CONFIGURATION: Final = Path.home() / ".config" / "pip" / "pip.conf"
WHO: Final = "eileen"
ABOUT: Final = """# Time to the first identified face

Each [tutorial](tutorial.md) step takes this time in an empty home directory. `python -m bench.newcomer` writes
this page.

| Step | Time | Result |
|---|---|---|
"""


@dataclass(frozen=True)
class Step:
    """``waited_s``: wall time; ``worked_s``: processor time of all processes of the step that ended."""

    command: str
    waited_s: float
    worked_s: float
    outcome: str


def run(folder: Path) -> list[Step]:
    """Run all steps. Raise SystemExit if a step fails or gives an unexpected answer."""
    clone, home = folder / "kith", folder / "home"
    home.mkdir()
    port = _free_port()
    environment = _environment(home, port)
    url = f"http://127.0.0.1:{port}"
    at = environment | {"KITH_URL": url}
    kith, python = str(clone / ".venv/bin/kith"), str(clone / ".venv/bin/python")
    steps: list[Step] = []

    def step(said: str, *command: str, cwd: Path = clone, env: dict[str, str] = environment) -> str:
        before, began = _worked(), time.perf_counter()
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        waited, worked = time.perf_counter() - began, _worked() - before
        if done.returncode:
            raise SystemExit(f"{said} failed with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        steps.append(Step(said, waited, worked, ""))
        print(f"{said}: {waited:.1f} s, {worked:.1f} s of the processor", flush=True)
        return done.stdout

    def came(outcome: str) -> None:
        steps[-1] = Step(steps[-1].command, steps[-1].waited_s, steps[-1].worked_s, outcome)

    step("git clone", "git", "clone", "--quiet", str(ROOT), str(clone), cwd=folder)
    came(_size(clone))
    step("make setup", "make", f"PYTHON={_base_python()}", "setup")
    came(f"{_size(clone / '.venv')} of packages")
    told = step("make demo", "make", f"PYTHON={_base_python()}", "demo")
    came(f"{told.split().count('right')} decisions, all correct; a picture")
    with _server(kith, clone, environment, url) as waited:
        steps.append(Step("make run", waited, 0.0, "the server is ready"))
        step(
            "python -m service.cli.tools.tutorial_photos .",
            python,
            "-m",
            "service.cli.tools.tutorial_photos",
            ".",
            env=at,
        )
        came("photos of four people")
        report = json.loads(
            step(
                "kith enroll people --gallery family",
                *(kith, "enroll", "people", "--gallery", "family", "--largest-face", "--json"),
                env=at,
            )
        )
        came(f"{report['enrolled']} enrolled, {len(report['refused'])} refused")
        command = (kith, "identify", "visitor.jpg", "--gallery", "family", "--json")
        answer = json.loads(step("kith identify visitor.jpg --gallery family", *command, env=at))
        (face,) = answer["visitor.jpg"]["results"]
        if (face["outcome"], face["subject"]) != ("identified", WHO):
            raise SystemExit(f"expected {WHO}: {face}")
        came(f"{face['subject']}, false alarm probability {face['false_alarm_probability']:.1g}")
    return steps


def _environment(home: Path, port: int) -> dict[str, str]:
    own = ("KITH_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment = kept | {"HOME": str(home), "COLUMNS": "150", "KITH_PORT": str(port)}
    if PIP_CONFIGURATION.exists():  # names the package index; this is no cache
        environment["PIP_CONFIG_FILE"] = str(PIP_CONFIGURATION)
    return environment


@contextmanager
def _server(kith: str, clone: Path, environment: dict[str, str], url: str) -> Iterator[float]:
    """Start a server; yield the seconds until it was ready."""
    began = time.perf_counter()
    with subprocess.Popen([kith, "serve"], cwd=clone, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            while not _is_ready(url):
                if server.poll() is not None or time.perf_counter() - began > READY_S:
                    raise SystemExit("the server did not become ready")
                time.sleep(0.05)
            yield time.perf_counter() - began
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _base_python() -> str:
    """Return the base interpreter, not that of a virtual environment."""
    return str(Path(sys.base_prefix) / "bin" / "python3")


def _worked() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _size(folder: Path) -> str:
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def page(steps: list[Step], cloned: str) -> str:
    """Format the page; ``cloned`` is the commit."""
    rows = [f"| `{step.command}` | {_seconds(step.waited_s)} | {step.outcome} |" for step in steps]
    total = sum(step.waited_s for step in steps)
    ready = f"| **total** | **{_seconds(total)}** | |"
    about = f"Measured {time.strftime('%Y-%m-%d')}, commit {cloned}, {machine()}, Python {platform.python_version()}."
    load = os.getloadavg()[2]
    others = f" The machine was shared: on average {load:.0f} processes were ready to run." if load > 1.5 else ""
    return f"{ABOUT}{chr(10).join([*rows, ready])}\n\n{about}{others}\n"


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kith-newcomer-") as place:
        cloned = commit().removesuffix("+")  # a clone holds only committed files
        text = page(run(Path(place)), cloned)
        TARGET.write_text(text, encoding="utf-8")
        print(text)
