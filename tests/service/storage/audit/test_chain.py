"""Text of audit lines, which their hashes cover."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from service.storage.db.audit_chain import Line

LINE = Line(1, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "event", "done", "key:a", "r", "g", "s", {"b": 1.5, "a": [None]})


def test_the_text_covers_everything() -> None:
    others: dict[str, Any] = {
        "number": 2,
        "at": LINE.at + timedelta(microseconds=1),
        "event": "other",
        "outcome": "refused",
        "actor": "key:b",
        "request_id": None,
        "gallery": None,
        "subject": None,
        "details": {"b": 1.5, "a": []},
    }
    assert set(others) == set(vars(LINE))
    texts = {replace(LINE, **{name: value}).text() for name, value in others.items()}
    assert len(texts | {LINE.text()}) == len(others) + 1


def test_equal_content_has_equal_texts() -> None:
    there = LINE.at.astimezone(timezone(timedelta(hours=2)))
    assert replace(LINE, at=there, details={"a": [None], "b": 1.5}).text() == LINE.text()
