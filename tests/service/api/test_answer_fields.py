"""Names and forms of fields, which are the same in all answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from kith.wire.fields import TIMESTAMP, rfc3339
from service.app import create_app
from service.settings import load_settings
from tests.conftest import jpeg

OTHER_NUMBERS = {
    "dimension",
    "embedding",
    "height",
    "image",
    "item",
    "line",
    "number",
    "other_face",
    "position",
    "sequence",
    "status",
    "top_k",
    "width",
}
"""Positions, sizes, limits and codes."""
TIME_OF_ANY_FORM = re.compile(r'"(\d{4}-\d\d-\d\d[T ]\d\d:[^"]*)"')
UNITS = ("_count", "_days", "_bytes", "_s")


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="ERROR")
    found: dict[str, Any] = create_app(settings).openapi()["components"]["schemas"]
    return found


def fields(schemas: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield schema, field and each of the field's types."""
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            for kind in value.get("anyOf", [value]):
                yield name, field, kind


def test_numbers_of_things_end_in_count(schemas: dict[str, Any]) -> None:
    numbers = {(name, field) for name, field, kind in fields(schemas) if kind.get("type") == "integer"}
    assert len(numbers) > 60
    assert [each for each in numbers if not each[1].endswith(UNITS) and each[1] not in OTHER_NUMBERS] == []
    by_kind = {
        (name, field)
        for name, field, kind in fields(schemas)
        if kind.get("type") == "object" and kind.get("additionalProperties", {}) not in (True, False)
        if kind.get("additionalProperties", {}).get("type") == "integer"
    }
    assert len(by_kind) > 4
    assert {field for _, field in by_kind if not field.endswith("counts")} == {"removed"}, "of a receipt"


def test_all_times_of_answers_have_the_same_form(schemas: dict[str, Any]) -> None:
    times = [(name, field, kind) for name, field, kind in fields(schemas) if kind.get("format") == "date-time"]
    answers = [each for each in times if not each[0].endswith("In")]
    assert len(answers) > 25
    assert [(name, field) for name, field, kind in answers if kind.get("pattern") != TIMESTAMP] == []


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
