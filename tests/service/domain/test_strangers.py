"""Sightings of a stranger make visits, and a face in front of a camera is seldom written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from service.domain.strangers import SIGHTING_STEP, VISIT_GAP, Stranger

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_an_hour_in_front_of_a_camera_is_one_visit_and_sixty_writes() -> None:
    stranger = Stranger(pk=1, id="s", first_seen=NOON, last_seen=NOON, seen_count=1, template_count=1)
    written = 0
    for second in range(3600):
        after = stranger.seen(NOON + timedelta(seconds=second))
        written += after is not stranger
        stranger = after
    assert written <= 60
    assert stranger.seen_count == 1
    assert NOON + timedelta(hours=1) - stranger.last_seen < 2 * SIGHTING_STEP


def test_a_visit_ends_after_its_gap_and_a_clock_that_goes_back_changes_nothing() -> None:
    stranger = Stranger(pk=1, id="s", first_seen=NOON, last_seen=NOON, seen_count=1, template_count=1)
    assert stranger.seen(NOON + VISIT_GAP).seen_count == 1
    again = stranger.seen(NOON + VISIT_GAP + timedelta(seconds=1))
    assert (again.seen_count, again.first_seen) == (2, NOON)
    assert stranger.seen(NOON - timedelta(days=1)) is stranger
