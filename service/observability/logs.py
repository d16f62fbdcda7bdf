"""Logging as text or JSON lines.

Messages must not contain personal data (tests/service/observability/test_logs.py).
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

from service.core.actor import current_actor

Format = Literal["text", "json"]
TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str, kind: Format) -> None:
    """Configure logging to standard error, unless it is configured already."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class JsonLines(logging.Formatter):
    """Formatter for one JSON object per line.

    Fields: ``time`` (UTC), ``level``, ``logger``, ``message``, ``request_id`` of the current request, fields given as
    ``extra={"fields": {...}}``, and ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        actor = current_actor()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": actor.request_id,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        present = {name: value for name, value in line.items() if value is not None}
        return json.dumps(present, default=str)
