"""Containers with podman and runc, restricted as in docs/deployment.md, one at a time."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Final, Self

from kith import Kith
from tests.faults.servers import free_port

KEY: Final = "check-" + "k" * 32
START_TIMEOUT_S: Final = 90
STOP_TIMEOUT_S: Final = 20
LOCKED: Final = (
    "--read-only",
    "--tmpfs",
    "/tmp:size=256m",
    "--cap-drop",
    "all",
    "--security-opt",
    "no-new-privileges",
    "--memory",
    "1g",
    "--pids-limit",
    "200",
    "--network",
    "host",
    # The defaults exceed the limits of root inside another container.
    "--ulimit",
    "nofile=1024:1024",
    "--ulimit",
    "nproc=1024:1024",
)


def podman(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run podman. ``status``: expected exit status; None allows any."""
    command = ["podman", "--runtime", "runc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert status is None or done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def run(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run one command in a new restricted container."""
    return podman("run", "--rm", *LOCKED, *arguments, status=status)


class Container:
    """Context manager of a container that runs ``kith serve``. The container and its unnamed volumes are removed on
    exit.
    """

    def __init__(self, image: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = f"kith-check-{uuid.uuid4().hex[:12]}"
        self.port = free_port()
        where = {"KITH_HOST": "127.0.0.1", "KITH_PORT": str(self.port), "KITH_API_KEY": KEY}
        settings = {**where, "KITH_DEVICE": "cpu", **(environment or {})}
        variables = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        podman("run", "--detach", "--name", self.name, *LOCKED, *variables, *options, image)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        podman("rm", "--force", "--volumes", self.name)

    def wait_until_healthy(self) -> None:
        """Wait for the image's own health check."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while podman("healthcheck", "run", self.name, status=None).returncode != 0:
            assert time.monotonic() < deadline, self.log()
            threading.Event().wait(0.1)

    def client(self) -> Kith:
        return Kith(f"http://127.0.0.1:{self.port}", KEY)

    def execute(self, *command: str, status: int | None = 0) -> str:
        return podman("exec", self.name, *command, status=status).stdout

    def restart(self) -> None:
        podman("restart", "--time", str(STOP_TIMEOUT_S), self.name)

    def stop(self) -> int:
        """Stop the container like podman stop, and return the exit status: 137 if it had to be killed."""
        podman("stop", "--time", str(STOP_TIMEOUT_S), self.name)
        return int(podman("inspect", "--format", "{{.State.ExitCode}}", self.name).stdout)

    def log(self) -> str:
        return podman("logs", self.name).stderr
