"""Logs of a real server: one document per line, with the fields that identify a request, and no personal data."""

from __future__ import annotations

import base64
import json
import logging
import sys
import uuid
from pathlib import Path
from typing import Any, Final, cast

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from service.app import create_app
from service.core.actor import Actor, acting_as
from service.observability.logs import JsonLines
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.faults.servers import Server

SECRETS: Final = ["quetzalcoatl-id", "Quetzalcoatl Name", "quetzalcoatl-tag", "quetzalcoatl-note", "quetzalcoatl-key"]
KEY: Final = "k" * 32


def test_lines_name_requests_and_no_subject(tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    subject, name, tag, note, key = SECRETS
    log, photo = tmp_path / "log", jpeg(astronaut)
    server = Server(tmp_path / "data", log=log, KITH_LOG_LEVEL="DEBUG", KITH_LOG_FORMAT="json", KITH_API_KEY=KEY)
    try:
        server.wait_until_ready()
        with Kith(server.url, KEY) as kith:
            kith.create_gallery("g")
            kith.put_subject("g", subject, name=name, tags=[tag], metadata={"note": note})
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
        httpx.get(f"{server.url}/v1/galleries/{subject}", headers={"X-API-Key": KEY})
        httpx.get(f"{server.url}/v1/galleries/{subject}")
        server.terminate(60)
    finally:
        server.close()
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"uvicorn.error", "service.access", "service.wiring"} <= {line["logger"] for line in lines}
    found, refused = [line for line in lines if line["logger"] == "service.access"][-2:]
    assert found["route"] == "/v1/galleries/{gallery}"
    assert (found["status"], found["code"], found["caller"]) == (404, "gallery_not_found", "operator")
    assert (refused["status"], refused["code"], refused["caller"]) == (401, "unauthorized", "anonymous")
    assert found["ms"] > 0
    assert found["request_id"] in found["message"]
    assert [secret for secret in SECRETS if secret.lower() in text.lower()] == []
    assert base64.b64encode(photo)[:40].decode() not in text
    assert str(vector[0])[:7] not in text


def test_the_frameworks_own_telemetry_is_off(tmp_path: Path) -> None:
    """An environment variable would enable it, and it records paths."""
    telemetry = create_app(load_settings(data_dir=tmp_path))._telemetry
    kinds = ("tracing", "metrics", "logs", "operation_spans", "auto_configure")
    assert [kind for kind in kinds if telemetry.get(kind)] == []


def test_a_request_id_is_taken_where_a_machine_made_it(server: str) -> None:
    given = uuid.uuid4()
    for sent in (str(given), given.hex, given.hex.upper()):
        assert httpx.get(f"{server}/healthz", headers={"X-Request-Id": sent}).headers["x-request-id"] == given.hex
    for wrong in ("ada-lovelace", "a" * 31, "a" * 33, f"{given.hex}@", ""):
        own = httpx.get(f"{server}/healthz", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert len(own) == 32
        assert own != wrong


def test_a_line_has_the_request_and_the_exception() -> None:
    record = logging.LogRecord("l", logging.INFO, "f", 1, "two\nlines %s", ("\udcff",), None)
    with acting_as(Actor("operator", "r")):
        told = json.loads(JsonLines().format(record))
    assert (told["message"], told["request_id"]) == ("two\nlines \udcff", "r")
    try:
        raise ValueError("inner")
    except ValueError:
        record.exc_info = sys.exc_info()
    told = json.loads(JsonLines().format(record))
    assert "ValueError: inner" in told["exception"]
    assert "request_id" not in told


def test_embedded_servers_leave_logging_as_it_is(tmp_path: Path) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger("uvicorn").handlers[:]
    with embedded(load_settings(data_dir=tmp_path, log_level="ERROR")) as url:
        assert httpx.get(f"{url}/readyz").is_success
    assert (logging.getLogger().handlers, logging.getLogger("uvicorn").handlers) == before
