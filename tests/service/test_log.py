"""The log, at its most talkative, says nothing of anybody."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from service.client import Kith, KithClientError
from tests.conftest import jpeg
from tests.faults.servers import START_TIMEOUT_S, free_port

SECRETS = ["quetzalcoatl-id", "Quetzalcoatl Name", "quetzalcoatl-tag", "quetzalcoatl-note", "quetzalcoatl-key"]


@dataclass(frozen=True)
class Talkative:
    url: str
    log: Path


@pytest.fixture
def talkative(tmp_path: Path) -> Iterator[Talkative]:
    port, log = free_port(), tmp_path / "log"
    environment = {"KITH_DATA_DIR": str(tmp_path / "data"), "KITH_PORT": str(port), "KITH_LOG_LEVEL": "DEBUG"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "service.cli", "serve"]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    running = Talkative(f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(running.url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


def test_nobody_is_named(talkative: Talkative, astronaut: NDArray[np.uint8]) -> None:
    subject, name, tag, note, key = SECRETS
    with Kith(talkative.url) as kith:
        kith.create_gallery("g")
        kith.put_subject("g", subject, name=name, tags=[tag], metadata={"note": note})
        photo = jpeg(astronaut)
        kith.enrol("g", subject, photo, idempotency_key=key)
        assert kith.identify("g", photo).results[0].subject == subject
        vector = kith.embed(photo).images[0].faces[0].embedding
        assert vector is not None
        for wrong in (
            lambda: kith.subject("g", f"{subject}-other"),
            lambda: kith.enrol("g", subject, b"no photo", idempotency_key=key),
            lambda: kith.enrol("g", subject, embeddings=[[1.0]]),
            lambda: kith.put_subject("g", subject, name=name * 1000),
            lambda: kith.identify("g", photo, filter={"nonsense": tag}),
        ):
            with pytest.raises(KithClientError):
                wrong()
        kith.delete_subject("g", subject)
    text = talkative.log.read_text()
    assert len(text.splitlines()) > 5, "it does say something"
    assert [secret for secret in SECRETS if secret.lower() in text.lower()] == []
    assert base64.b64encode(photo)[:40].decode() not in text
    assert str(vector[0])[:7] not in text
