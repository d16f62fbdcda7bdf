"""Stored face crops of subjects, templates and strangers."""

from __future__ import annotations

import asyncio
import io

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import AsyncKith, Kith
from tests.conftest import jpeg


@pytest.fixture
def http(server: str) -> httpx.Client:
    return httpx.Client(base_url=f"{server}/v1/galleries", timeout=60)


def test_a_crop_and_that_of_the_best_template(
    kith: Kith, gallery: str, http: httpx.Client, astronaut: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, keep_crops=True)
    dark = (astronaut * 0.4).astype(np.uint8)
    templates = [
        kith.enroll(gallery, "ada", jpeg(photo), face="largest", allow_low_quality=True, allow_inconsistent=True)
        .results[0]
        .template
        for photo in (astronaut, dark)
    ]
    with http:
        paths = [f"/{gallery}/subjects/ada/templates/{template}/crop" for template in templates]
        crops = [http.get(path) for path in paths]
        assert [crop.status_code for crop in crops] == [200, 200]
        assert crops[0].headers["content-type"] == "image/webp"
        with Image.open(io.BytesIO(crops[0].content)) as image:
            assert min(image.size) > 100
        scores = [(template.quality or {})["score"] for template in kith.templates(gallery, "ada")]
        assert kith.crops(gallery, [{"subject": "ada"}]) == [crops[int(np.argmax(scores))].content]
        etag = crops[0].headers["etag"]
        unchanged = http.get(paths[0], headers={"If-None-Match": f'"other", {etag}'})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
        assert crops[0].headers["cache-control"] == "private, no-cache"
        kith.delete_subject(gallery, "ada")
        assert http.get(paths[0]).json()["code"] == "subject_not_found"
    read = [entry for entry in kith.audit(gallery) if entry.event == "crop_read"]
    assert len(read) == 3, "the unchanged one was not read again"


def test_without_stored_crops_the_answer_says_how_to_store_them(
    kith: Kith, gallery: str, http: httpx.Client, astronaut: NDArray[np.uint8]
) -> None:
    template = kith.enroll(gallery, "ada", jpeg(astronaut)).results[0].template
    with http:
        problem = http.get(f"/{gallery}/subjects/ada/templates/{template}/crop").json()
        assert (problem["status"], problem["code"]) == (404, "crop_not_found")
        assert "keep_crops" in problem["remedy"]
        absent = http.get(f"/{gallery}/subjects/ada/templates/{'0' * 32}/crop").json()
    assert absent["code"] == "template_not_found"


def test_many_crops_are_read_at_once_with_one_audit_line(
    kith: Kith, server: str, gallery: str, astronaut: NDArray[np.uint8], http: httpx.Client
) -> None:
    kith.update_gallery(gallery, keep_crops=True, remember_strangers_days=30)
    results = kith.identify(gallery, jpeg(astronaut), faces="largest").results
    stranger = results[0].stranger
    assert stranger is not None
    templates = {}
    for subject, photo in (("ada", astronaut), ("grace", astronaut[:, ::-1])):
        enrolled = kith.enroll(gallery, subject, jpeg(photo), face="largest", allow_duplicate=True)
        templates[subject] = enrolled.results[0].template or ""
    kith.update_gallery(gallery, keep_crops=False)
    kith.enroll(gallery, "plain", jpeg(astronaut), face="largest", allow_duplicate=True)
    wanted = [
        {"subject": "grace"},
        {"subject": "ada", "template": templates["ada"]},
        {"subject": "ada", "template": templates["grace"]},
        {"subject": "nobody"},
        {"subject": "plain"},
        {"stranger": stranger.id},
        {"stranger": "0" * 32},
    ]
    crops = kith.crops(gallery, wanted)
    assert [crop is not None for crop in crops] == [True, True, False, False, False, True, False]
    (line,) = kith.audit(gallery, event="crop_read")
    assert line.details["count"] == 3
    assert (line.details["strangers"], line.details["templates"]) == ([stranger.id], [templates["ada"]])
    assert len(line.details["subjects"]) == 2
    for subject, lines in (("ada", 1), ("grace", 1), ("nobody", 0), ("plain", 0)):
        assert len(list(kith.audit(gallery, event="crop_read", subject=subject))) == lines
    assert crops[0] == kith.crop(gallery, "grace", templates["grace"])
    assert crops[1] == kith.crop(gallery, "ada", templates["ada"])

    async def read() -> list[bytes | None]:
        async with AsyncKith(server) as client:
            return await client.crops(gallery, wanted)

    assert asyncio.run(read()) == crops
    kith.create_gallery("elsewhere")
    assert kith.crops("elsewhere", wanted) == [None] * len(wanted)
    assert list(kith.audit("elsewhere", event="crop_read")) == [], "nothing was shown"
