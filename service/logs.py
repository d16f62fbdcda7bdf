"""The log, as lines for people or as a JSON document each, the HTTP server's own included. Its fields are few, and tell
of nobody: what a message says is its author's care (tests/service/test_log.py)."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

import orjson

from service.security.acting import acting

Format = Literal["text", "json"]
TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str, kind: Format) -> None:
    """Of this process, on standard error; nothing where somebody configured it before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``request_id`` and ``trace_id`` of the request that something
    is said of; what else was given as ``extra={"fields": {...}}``; ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        actor = acting()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": actor.request_id,
            "trace_id": actor.trace_id,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        told = {name: value for name, value in line.items() if value is not None}
        try:
            return orjson.dumps(told, default=str).decode()
        except TypeError:  # of half a surrogate, as in the name of a file that is no UTF-8
            return json.dumps(told, default=str)
