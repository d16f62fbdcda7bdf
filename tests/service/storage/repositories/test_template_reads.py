"""Reads of templates by id, by offset, with their vectors, and of stored crops."""

from __future__ import annotations

import uuid
from typing import Final

import numpy as np
import pytest

from kith.wire.crops import CropIn
from models.vision.recognition import l2_normalize
from service.core.errors import SubjectNotFoundError
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate
from service.storage.repositories.store import Store
from tests.refusals import raises_code

DIMENSION: Final = 8
POINTS: Final = ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0), (9.0, 10.0))


@pytest.fixture
def gallery(store: Store) -> Gallery:
    store.galleries.create("other", "f" * 32, DIMENSION, GallerySettings())
    return store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings(keep_crops=True))


def _template(rng: np.random.Generator, quality: float | None, crop: bytes | None = None) -> NewTemplate:
    (vector,) = l2_normalize(rng.normal(size=(1, DIMENSION)))
    kept = None if crop is None else Crop(crop, POINTS)
    return NewTemplate(uuid.uuid4().hex, vector, "photo", {"score": quality} if quality else None, 0.9, crop=kept)


def test_reads_by_id_and_by_offset(store: Store, gallery: Gallery, rng: np.random.Generator) -> None:
    ada, tom = [_template(rng, 0.5), _template(rng, 0.6)], [_template(rng, None)]
    store.templates.enroll(gallery, "ada", ada, None)
    store.templates.enroll(gallery, "tom", tom, None)
    found = store.templates.find(gallery, tom[0].id)
    assert (found.subject, found.id) == ("tom", tom[0].id)
    ids = [template.id for template in (*ada, *tom)]
    assert [each.id for each in store.templates.list_by_offset(gallery, None, 0, None)] == ids
    assert [each.id for each in store.templates.list_by_offset(gallery, None, 1, 1)] == ids[1:2]
    assert [each.id for each in store.templates.list_by_offset(gallery, "ada", 1, 5)] == ids[1:2]
    with pytest.raises(SubjectNotFoundError):
        store.templates.list_by_offset(gallery, "eve", 0, 5)
    other = store.galleries.get("other")
    assert store.templates.list_by_offset(other, None, 0, None) == []
    with raises_code("template_not_found"):
        store.templates.find(other, tom[0].id)


def test_the_crop_of_a_subject_is_that_of_the_best_quality(
    store: Store, gallery: Gallery, rng: np.random.Generator
) -> None:
    enrolled = [_template(rng, 0.4, b"dull"), _template(rng, 0.9, b"sharp"), _template(rng, 0.99)]
    store.templates.enroll(gallery, "ada", enrolled, None)
    store.templates.enroll(gallery, "tom", [_template(rng, 0.9)], None)
    assert store.crops.read(gallery, [CropIn(subject="ada"), CropIn(subject="tom")]) == [b"sharp", None]
    dull, none = enrolled[0].id, enrolled[2].id
    wanted = [CropIn(subject=owner, template=one) for owner, one in (("ada", dull), ("ada", none), ("tom", dull))]
    assert store.crops.read(gallery, wanted) == [b"dull", None, None]
