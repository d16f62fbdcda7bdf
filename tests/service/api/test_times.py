"""Times have one form in all answers, events and exports."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone

import httpx2 as httpx
import numpy as np
from numpy.typing import NDArray

from kith import Kith
from kith.wire.fields import TIMESTAMP, rfc3339
from tests.conftest import jpeg

TIME_OF_ANY_FORM = re.compile(r'"(\d{4}-\d\d-\d\d[T ]\d\d:[^"]*)"')


def test_times_are_in_utc_with_microseconds() -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    assert rfc3339(datetime(2026, 1, 31, 12, 0, tzinfo=east)) == "2026-01-31T06:30:00.000000Z"
    assert rfc3339(datetime(1, 1, 1, 0, 0, 0, 7, UTC)) == "0001-01-01T00:00:00.000007Z"


def test_answers_events_and_exports_have_times_of_that_form(
    kith: Kith, server: str, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, keep_crops=True, remember_strangers_days=30)
    with httpx.Client(base_url=f"{server}/v1", timeout=60) as http:
        home = f"/galleries/{gallery}"
        photo, kind = jpeg(astronaut), {"Content-Type": "image/jpeg"}
        seen = http.post(f"{home}/identify?faces=largest", content=photo, headers=kind).json()
        stranger = seen["results"][0]["stranger"]["id"]
        http.post(f"{home}/subjects/ada/templates?face=largest", content=photo, headers=kind).raise_for_status()
        http.put(f"{home}/subjects/gone", json={})
        answers = [
            json.dumps(seen),
            http.delete(f"{home}/subjects/gone").text,
            http.post(f"{home}/enrollments", content=b"PK", headers={"Content-Type": "application/zip"}).text,
            *(
                http.get(path).raise_for_status().text
                for path in (
                    "/status",
                    "/jobs",
                    "/webhooks",
                    "/audit",
                    "/galleries",
                    home,
                    *(f"{home}/{name}" for name in ("audit", "risk", "erasures", "export")),
                    f"{home}/subjects",
                    f"{home}/subjects/ada/templates",
                    f"{home}/subjects/ada/export",
                    f"{home}/subjects/gone/export",
                    f"{home}/strangers",
                    f"{home}/strangers/{stranger}/export",
                )
            ),
        ]
    times = [(time, answer[:80]) for answer in answers for time in TIME_OF_ANY_FORM.findall(answer)]
    assert len(times) > 40
    assert [each for each in times if not re.fullmatch(TIMESTAMP, each[0])] == []
