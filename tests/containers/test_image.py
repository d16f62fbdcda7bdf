"""The restricted image serves requests, persists its data, and completes accepted requests. make container-check
builds the image and runs these tests.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from tests.conftest import is_eventually, jpeg
from tests.containers.podman import KEY, Container, podman, run

GALLERY = "check"
Photo = NDArray[np.uint8]


@pytest.fixture(scope="session")
def image() -> str:
    name = os.environ.get("KITH_IMAGE")
    if not name:
        pytest.skip("KITH_IMAGE names no image: make container-check")
    return name


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[Container]:
    with Container(image) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture
def volumes() -> Iterator[list[str]]:
    """Options that mount a volume for the data and a volume for the master key."""
    names = [f"kith-check-{uuid.uuid4().hex}" for _ in range(2)]
    yield ["--volume", f"{names[0]}:/data", "--volume", f"{names[1]}:/keys"]
    podman("volume", "rm", "--force", *names, status=None)


def recognizes(kith: Kith, astronaut: Photo, group: Photo) -> None:
    (found,) = kith.identify(GALLERY, jpeg(astronaut[:, ::-1]), faces="largest").results
    assert found.subject == "collins"
    strangers = kith.identify(GALLERY, jpeg(group)).results
    assert len(strangers) > 3
    assert {each.subject for each in strangers} == {None}


def test_it_may_do_nothing_but_serve(container: Container) -> None:
    assert container.execute("id", "-u").strip() == "10001"
    status = dict(line.split(":", 1) for line in container.execute("cat", "/proc/1/status").splitlines())
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert int(status["NoNewPrivs"]) == 1
    for place in ("/opt/kith/code/x", "/opt/kith/env/x", "/etc/x", "/usr/x", "/x"):
        said = container.execute("sh", "-c", f"touch {place} 2>&1", status=1)
        assert "Read-only file system" in said, place
    container.execute("sh", "-c", "touch /data/x /tmp/x && rm /data/x /tmp/x")
    # Signals reach the service directly, without a shell in between.
    assert container.execute("cat", "/proc/1/cmdline").split("\0")[1:3] == ["/opt/kith/code/bin/kith", "serve"]
    told = [line for line in container.log().splitlines() if "GPU" not in line]
    (warning,) = [line for line in told if re.search("WARNING|ERROR|Traceback", line)]
    assert "created the master key" in warning


def test_it_refuses_to_serve_the_world_without_a_key(image: str) -> None:
    assert "refusing to listen on 0.0.0.0" in run(image, status=2).stderr


def test_what_it_accepted_is_answered_before_it_stops(image: str, astronaut: Photo) -> None:
    with Container(image) as running:
        running.wait_until_healthy()
        body = jpeg(astronaut)
        head = f"POST /v1/detect HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Type: image/jpeg\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
            codes: list[int] = []
            stopping = threading.Thread(target=lambda: codes.append(running.stop()))
            stopping.start()
            is_eventually(lambda: not accepts(running.port))
            connection.sendall(body[-1:])
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        stopping.join(60)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"landmarks"' in answer
    assert codes == [0], "it ended by itself"


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_another_container_takes_over_with_the_key_alone(
    image: str, volumes: list[str], astronaut: Photo, group: Photo
) -> None:
    """Upgrades keep the volumes and replace the container. The key is created as in compose.yaml."""
    made = "test -s /keys/master.key || (umask 077 && head -c 32 /dev/urandom | base64 >/keys/master.key)"
    for _ in range(2):
        run(*volumes, image, "sh", "-c", made)
    where = {"KITH_MASTER_KEY_FILE": "/keys/master.key"}
    with Container(image, *volumes, environment=where) as first:
        first.wait_until_healthy()
        with first.client() as kith:
            kith.create_gallery(GALLERY)
            kith.enroll(GALLERY, "collins", jpeg(astronaut))
            first.restart()
            first.wait_until_healthy()
            recognizes(kith, astronaut, group)
        assert "master.key" not in first.execute("ls", "/data")
        first.execute("kith", "backup", "/data/kith.backup")
        assert first.stop() == 0
    with Container(image, *volumes, environment=where) as second:
        second.wait_until_healthy()
        with second.client() as kith:
            recognizes(kith, astronaut, group)
    with Container(image, *volumes[:2]) as without:
        assert int(podman("wait", without.name).stdout) != 0, "it makes no other key for what one has sealed"
        assert "master key" in without.log()
    key = ("--env", "KITH_MASTER_KEY_FILE=/keys/master.key")
    done = run(*volumes, *key, image, "kith", "restore", "--replace", "/data/kith.backup")
    assert "people, as of" in done.stdout, done.stderr


def test_a_key_is_mounted_as_kubernetes_mounts_a_secret(image: str, tmp_path: Path) -> None:
    """Files owned by root, readable by the fsGroup, behind symbolic links."""
    held = tmp_path / "keys" / "..data"
    held.mkdir(parents=True)
    (held / "master.key").write_bytes(base64.b64encode(bytes(range(32))))
    (held / "master.key").chmod(0o440)
    os.chown(held / "master.key", 0, 10001)
    (tmp_path / "keys" / "master.key").symlink_to("..data/master.key")
    for folder in (held.parent, held):
        folder.chmod(0o755)
    options = ("--volume", f"{held.parent}:/keys:ro")
    with Container(image, *options, environment={"KITH_MASTER_KEY_FILE": "/keys/master.key"}) as running:
        running.wait_until_healthy()


def test_a_gpu_that_is_missing_is_said(image: str) -> None:
    """The GPU image is not ready without a GPU."""
    if not image.endswith("gpu"):
        pytest.skip("the image is not for GPUs")
    said = run(image, "kith", "doctor", "--json", status=None).stdout
    assert "no NVIDIA driver is installed" in " ".join(said.split())
    with Container(image, environment={"KITH_DEVICE": "gpu"}) as running:
        is_eventually(lambda: accepts(running.port))
        assert httpx.get(f"http://127.0.0.1:{running.port}/readyz", timeout=30).json()["code"] == "gpu_unavailable"
