"""Debug logs contain no personal data."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from service.app import create_app
from service.settings import load_settings
from tests.conftest import jpeg
from tests.faults.servers import Server

SECRETS = ["quetzalcoatl-id", "Quetzalcoatl Name", "quetzalcoatl-tag", "quetzalcoatl-note", "quetzalcoatl-key"]


@dataclass(frozen=True)
class Talkative:
    url: str
    log: Path


@pytest.fixture
def talkative(tmp_path: Path) -> Iterator[Talkative]:
    log = tmp_path / "log"
    server = Server(tmp_path / "data", log=log, KITH_LOG_LEVEL="DEBUG")
    try:
        server.wait_until_ready()
        yield Talkative(server.url, log)
    finally:
        server.close()


def test_logs_name_no_subject(talkative: Talkative, astronaut: NDArray[np.uint8]) -> None:
    subject, name, tag, note, key = SECRETS
    with Kith(talkative.url) as kith:
        kith.create_gallery("g")
        kith.put_subject("g", subject, name=name, tags=[tag], metadata={"note": note})
        photo = jpeg(astronaut)
        kith.enroll("g", subject, photo, idempotency_key=key)
        assert kith.identify("g", photo).results[0].subject == subject
        vector = kith.embed(photo).images[0].faces[0].embedding
        assert vector is not None
        for wrong in (
            lambda: kith.subject("g", f"{subject}-other"),
            lambda: kith.enroll("g", subject, b"no photo", idempotency_key=key),
            lambda: kith.enroll("g", subject, embeddings=[[1.0]]),
            lambda: kith.put_subject("g", subject, name=name * 1000),
            lambda: kith.identify("g", photo, filter=cast(Any, {"nonsense": tag})),
        ):
            with pytest.raises(KithClientError):
                wrong()
        kith.delete_subject("g", subject)
    text = talkative.log.read_text()
    assert len(text.splitlines()) > 5, "it does say something"
    assert [secret for secret in SECRETS if secret.lower() in text.lower()] == []
    assert base64.b64encode(photo)[:40].decode() not in text
    assert str(vector[0])[:7] not in text


def test_the_frameworks_own_telemetry_is_off(tmp_path: Path) -> None:
    """An environment variable would enable it, and it records paths."""
    telemetry = create_app(load_settings(data_dir=tmp_path))._telemetry
    kinds = ("tracing", "metrics", "logs", "operation_spans", "auto_configure")
    assert [kind for kind in kinds if telemetry.get(kind)] == []
