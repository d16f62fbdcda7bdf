"""JSON logs of a real server: one document per line, with the fields that identify a request."""

from __future__ import annotations

import json
import logging
import sys
import uuid
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from service.core.actor import Actor, acting_as
from service.observability.logs import JsonLines
from service.server import embedded
from service.settings import load_settings
from tests.faults.servers import Server

NAME = "huitzilopochtli"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Log lines of a server that answered a few requests and stopped."""
    folder, key = tmp_path_factory.mktemp("logs"), "k" * 32
    log = folder / "log"
    server = Server(folder, log=log, KITH_LOG_LEVEL="INFO", KITH_LOG_FORMAT="json", KITH_API_KEY=key)
    try:
        server.wait_until_ready()
        httpx.get(f"{server.url}/v1/galleries/{NAME}", headers={"X-API-Key": key})
        httpx.get(f"{server.url}/v1/galleries/{NAME}")
        httpx.get(f"{server.url}/healthz", headers={"X-Request-Id": "6BA7B810-9DAD-11D1-80B4-00C04FD430C8"})
        server.terminate(60)
    finally:
        server.close()
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_line_is_a_document_also_the_http_servers(lines: list[dict[str, Any]]) -> None:
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"uvicorn.error", "service.access", "service.wiring"} <= {line["logger"] for line in lines}


def test_requests_have_their_fields_and_nobodys_name(lines: list[dict[str, Any]]) -> None:
    found, refused, health = [line for line in lines if line["logger"] == "service.access"][-3:]
    assert found["route"] == "/v1/galleries/{gallery}"
    assert (found["status"], found["code"], found["caller"]) == (404, "gallery_not_found", "operator")
    assert (refused["status"], refused["code"], refused["caller"]) == (401, "unauthorized", "anonymous")
    assert found["ms"] > 0
    assert found["request_id"] in found["message"]
    assert health["request_id"] == "6ba7b8109dad11d180b400c04fd430c8"
    assert NAME not in json.dumps(lines)


def test_a_request_id_is_taken_where_a_machine_made_it(server: str) -> None:
    given = uuid.uuid4()
    for sent in (str(given), given.hex, given.hex.upper()):
        assert httpx.get(f"{server}/healthz", headers={"X-Request-Id": sent}).headers["x-request-id"] == given.hex
    for wrong in ("ada-lovelace", "a" * 31, "a" * 33, f"{given.hex}@", ""):
        own = httpx.get(f"{server}/healthz", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert len(own) == 32
        assert own != wrong


def test_a_line_with_half_a_surrogate_is_not_lost() -> None:
    record = logging.LogRecord("l", logging.INFO, "f", 1, "of %s", ("photo-\udcff.jpg",), None)
    assert json.loads(JsonLines().format(record))["message"] == "of photo-\udcff.jpg"


def test_a_line_is_one_line_whatever_it_holds() -> None:
    record = logging.LogRecord("l", logging.INFO, "f", 1, "two\nlines \x1b[31m %s", ("ä",), None)
    with acting_as(Actor("operator", "r")):
        line = JsonLines().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    told = json.loads(line)
    assert (told["message"], told["request_id"]) == ("two\nlines \x1b[31m ä", "r")
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
