"""Filters of webhooks, and when a failed delivery is repeated."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from service.domain.events import (
    GIVE_UP_AFTER,
    LONGEST_RETRY,
    MAX_REFUSALS,
    Event,
    EventFilter,
    next_attempt,
)

NOW = datetime(2026, 1, 31, tzinfo=UTC)
STRANGER = Event("decision", {"outcome": "unknown", "false_alarm_probability": 0.4})
RISKY = Event("decision", {"outcome": "identified", "false_alarm_probability": 0.001})
CERTAIN = Event("decision", {"outcome": "identified", "false_alarm_probability": 0.00001})
ALONE = Event("decision", {"outcome": "unknown"})
DRIFT = Event("drift", {"state": "watch"})
ALL = [STRANGER, RISKY, CERTAIN, ALONE, DRIFT]


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ({}, ALL),
        ({"galleries": {"g", "h"}}, ALL),
        ({"galleries": {"h"}}, []),
        ({"types": {"drift"}}, [DRIFT]),
        ({"outcomes": {"unknown"}}, [STRANGER, ALONE, DRIFT]),
        ({"min_risk": 0.001}, [STRANGER, RISKY, ALONE, DRIFT]),
        ({"min_risk": 0.001, "outcomes": {"identified"}, "types": {"decision"}}, [RISKY]),
    ],
)
def test_a_filter_passes_what_it_names(chosen: dict[str, Any], wanted: list[Event]) -> None:
    given: dict[str, Any] = {name: frozenset(v) if isinstance(v, set) else v for name, v in chosen.items()}
    made = EventFilter(**given)
    assert [event for event in ALL if made.wants("g", event)] == wanted
    assert made.wants_decisions_of("g") == any(event.type == "decision" for event in wanted)


def test_waits_grow_up_to_an_hour_and_end_after_a_day() -> None:
    at, failed, waits = NOW, 0, list[timedelta]()
    while True:
        failed += 1
        again = next_attempt(failed, NOW, at, 503)
        if again is None:
            break
        waits.append(again - at)
        at = again
    assert waits[:3] == [timedelta(seconds=2), timedelta(seconds=6), timedelta(seconds=18)]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_RETRY
    assert GIVE_UP_AFTER <= at - NOW < GIVE_UP_AFTER + LONGEST_RETRY


@pytest.mark.parametrize(
    ("status", "final"),
    [(400, True), (404, True), (410, True), (302, True), (408, False), (429, False), (500, False), (None, False)],
)
def test_a_receiver_that_refuses_is_asked_a_few_times(status: int | None, final: bool) -> None:
    assert next_attempt(MAX_REFUSALS - 1, NOW, NOW, status) is not None
    assert (next_attempt(MAX_REFUSALS, NOW, NOW, status) is None) == final
