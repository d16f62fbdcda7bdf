"""Stored face crops of subjects, templates and strangers."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from tests.conftest import jpeg


def test_the_crop_of_a_subject_is_that_of_its_best_template(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8], group: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, keep_crops=True)
    dark = (astronaut * 0.4).astype(np.uint8)
    for photo in (astronaut, dark):
        kith.enroll(gallery, "ada", jpeg(photo), face="largest", allow_low_quality=True, allow_inconsistent=True)
    own = [{"subject": "ada", "template": each.id} for each in kith.templates(gallery, "ada")]
    best, *crops = kith.crops(gallery, [{"subject": "ada"}, *own])
    assert best == crops[0] != crops[1] and best is not None
    with Image.open(io.BytesIO(best)) as image:
        assert image.format == "WEBP" and min(image.size) > 100
    kith.delete_subject(gallery, "ada")
    assert kith.crops(gallery, [{"subject": "ada"}]) == [None]
    assert len(list(kith.audit(gallery, event="crop_read"))) == 1, "nothing was shown of the erased one"
    kith.enroll(gallery, "ada", jpeg(group[:, ::-1]), face="largest", allow_low_quality=True)
    assert kith.crops(gallery, [{"subject": "ada"}]) != [None], "the main face is the fifth that was found"


def test_many_crops_are_read_at_once_with_one_audit_line(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, remember_strangers_days=30, keep_crops=True)
    stranger = kith.identify(gallery, jpeg(astronaut), faces="largest").results[0].stranger
    assert stranger is not None
    assert kith.export_stranger(gallery, stranger.id)["subject"]["templates"][0]["crops"][0]["image"]
    templates = {}
    for subject, photo in (("ada", astronaut), ("grace", astronaut[:, ::-1]), ("plain", astronaut)):
        kith.update_gallery(gallery, keep_crops=subject != "plain")
        enrolled = kith.enroll(gallery, subject, jpeg(photo), face="largest", allow_duplicate=True)
        templates[subject] = enrolled.results[0].template or ""
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
    assert crops[0] != crops[1]
    (line,) = kith.audit(gallery, event="crop_read")
    assert (line.details["count"], len(line.details["subjects"])) == (3, 2)
    assert (line.details["strangers"], line.details["templates"]) == ([stranger.id], [templates["ada"]])
    for subject, lines in (("ada", 1), ("grace", 1), ("nobody", 0), ("plain", 0)):
        assert len(list(kith.audit(gallery, event="crop_read", subject=subject))) == lines

    kith.create_gallery("elsewhere")
    assert kith.crops("elsewhere", wanted) == [None] * len(wanted)
    assert list(kith.audit("elsewhere", event="crop_read")) == [], "nothing was shown"
    kith.delete_gallery("elsewhere")
