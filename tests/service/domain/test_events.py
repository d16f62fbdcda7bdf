"""Filters of webhooks, and when a failed delivery is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.events import LONGEST_RETRY, Event, EventFilter, pause_s

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
    made = EventFilter(**chosen)
    assert [event for event in ALL if made.wants("g", event)] == wanted
    assert made.may_want("g", "decision") == any(event.type == "decision" for event in wanted)


def test_waits_grow_up_to_an_hour_whatever_a_receiver_asks_for() -> None:
    waits = [pause_s(failures, None) for failures in range(1, 99)]
    assert waits[:3] == [2, 6, 18]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_RETRY.total_seconds()
    assert [pause_s(1, asked) for asked in (0, 60, 1e9, -5)] == [2, 60, LONGEST_RETRY.total_seconds(), 2]
