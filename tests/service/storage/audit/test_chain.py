"""Text of audit lines, which their hashes cover."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from service.storage.db.audit_chain import SIGNED, text_of

AT = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
LINE: dict[str, Any] = {
    "number": 1,
    "at": AT,
    "event": "event",
    "outcome": "done",
    "actor": "key:a",
    "request_id": "r",
    "gallery": "g",
    "subject": "s",
    "details": {"b": 1.5, "a": [None]},
}


def test_the_text_covers_everything() -> None:
    others: dict[str, Any] = {
        "number": 2,
        "at": AT + timedelta(microseconds=1),
        "event": "other",
        "outcome": "refused",
        "actor": "key:b",
        "request_id": None,
        "gallery": None,
        "subject": None,
        "details": {"b": 1.5, "a": []},
    }
    assert set(others) == set(LINE) == set(SIGNED)
    texts = {text_of(LINE | {name: value}) for name, value in others.items()}
    assert len(texts | {text_of(LINE)}) == len(others) + 1


def test_equal_content_has_equal_texts() -> None:
    there = AT.astimezone(timezone(timedelta(hours=2)))
    assert text_of(LINE | {"at": there, "details": {"a": [None], "b": 1.5}}) == text_of(LINE)
