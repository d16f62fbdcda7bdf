"""How much of a body is taken, by the route that it is for."""

from __future__ import annotations

from service.api.middleware import WITHOUT_PHOTOS_BYTES, Gate
from service.api.permissions import GALLERY, PERMISSIONS, SUBJECT
from service.settings import load_settings

PHOTOS = {
    "POST /v1/detect",
    "POST /v1/embed",
    "POST /v1/verify",
    f"POST {GALLERY}/identify",
    f"POST {SUBJECT}/templates",
}


async def nothing(*_given: object) -> None: ...


def test_only_routes_that_need_more_get_more_whatever_people_are_called() -> None:
    settings = load_settings(max_archive_bytes=4_000_000, max_import_bytes=5_000_000)
    expected = {f"POST {GALLERY}/enrolments": 4_000_000, f"POST {GALLERY}/import": 5_000_000}
    expected |= dict.fromkeys(PHOTOS, settings.max_request_bytes)
    gate = Gate(nothing, settings)
    assert expected.keys() <= PERMISSIONS.keys()
    for route in PERMISSIONS:
        method, _, path = route.partition(" ")
        for name in ("ada", "import", "enrolments", "identify", "templates"):
            filled = path.format(gallery=name, subject=name, template=name, job=name, key=name, receipt=name)
            assert gate._limit(method, filled) == expected.get(route, WITHOUT_PHOTOS_BYTES), (method, filled)
            assert gate._limit("PUT", filled) == WITHOUT_PHOTOS_BYTES
