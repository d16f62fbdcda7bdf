"""Hash chain of audit lines: each hash covers all earlier lines."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from service.storage.audit.chain import BEFORE_ALL, Line, mac

LINE = Line(1, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "event", "done", "key:a", "r", "g", "s", {"b": 1.5, "a": [None]})


def test_a_hash_covers_everything() -> None:
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
    hashes = {replace(LINE, **{name: value}).hash(BEFORE_ALL) for name, value in others.items()}
    assert len(hashes | {LINE.hash(BEFORE_ALL), LINE.hash(LINE.hash(BEFORE_ALL))}) == len(others) + 2


def test_equal_content_has_equal_hashes() -> None:
    there = LINE.at.astimezone(timezone(timedelta(hours=2)))
    assert replace(LINE, at=there, details={"a": [None], "b": 1.5}).hash(BEFORE_ALL) == LINE.hash(BEFORE_ALL)


def test_the_mac_of_a_head_depends_on_the_secret() -> None:
    last = LINE.hash(BEFORE_ALL)
    assert len({mac(b"s" * 32, 1, last), mac(b"t" * 32, 1, last), mac(b"s" * 32, 2, last)}) == 3
