"""A person is identified in one face of a photo, no face more is identified, and no number gets more favorable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from service.risk.decision import decide
from service.risk.one_face import ELSEWHERE, one_face_per_person
from service.risk.search import Identification
from service.risk.threshold import Candidate, Thresholds
from tests.conftest import jpeg

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)
ADA, BO, CY = 1, 2, 3


def answer(**similarities: float) -> Identification:
    """Answer with fixed thresholds, best first."""
    keys = {"ada": ADA, "bo": BO, "cy": CY}
    ranked = [Candidate(keys[name], s, s) for name, s in similarities.items()]
    return Identification(decide(ranked, AT), ranked, AT)


@pytest.mark.parametrize(
    ("faces", "outcomes", "other_faces"),
    [
        # The better face keeps the person. The other becomes no one else.
        ([{"ada": 0.6, "bo": 0.1}, {"ada": 0.7, "bo": 0.2}], ["uncertain", "identified"], [1, None]),
        ([{"ada": 0.8, "bo": 0.52}, {"ada": 0.9, "bo": 0.2}], ["uncertain", "identified"], [1, None]),
        # Of equal faces the first is the person.
        (
            [{"bo": 0.7}, {"ada": 0.7}, {"ada": 0.7}, {"bo": 0.8}, {"ada": 0.3}],
            ["uncertain", "identified", "uncertain", "identified", "unknown"],
            [3, None, 1, None, None],
        ),
        # A face uncertain between two people keeps its person from a weaker one.
        ([{"ada": 0.8, "bo": 0.7}, {"ada": 0.6}], ["uncertain", "uncertain"], [None, 0]),
        # An uncertain face stays uncertain, and says where the person is.
        (
            [{"ada": 0.8, "bo": 0.7}, {"ada": 0.45}, {"ada": 0.9}],
            ["uncertain", "uncertain", "identified"],
            [2, 2, None],
        ),
    ],
)
def test_a_person_is_identified_in_the_best_face(
    faces: list[dict[str, float]], outcomes: list[str], other_faces: list[int | None]
) -> None:
    before = [answer(**similarities) for similarities in faces]
    after = one_face_per_person(before)
    assert [one.decision.outcome for one in after] == outcomes
    assert [one.other_face for one in after] == other_faces
    for one, other in zip(before, after, strict=True):
        assert other.reasons == (() if other.other_face is None else (ELSEWHERE,))
        assert other.other_face is not None or other == one


Similarity = st.floats(0, 1).map(lambda value: round(value, 1))  # some are equal


@given(st.lists(st.dictionaries(st.sampled_from(["ada", "bo", "cy"]), Similarity), max_size=6))
def test_nobody_is_identified_twice_or_instead_of_another_and_no_number_gets_more_favorable(
    faces: list[dict[str, float]],
) -> None:
    before = [answer(**dict(sorted(each.items(), key=lambda one: -one[1]))) for each in faces]
    after = one_face_per_person(before)
    assert after == one_face_per_person(before)
    named = [one.decision.best for one in after if one.decision.outcome == "identified"]
    assert len({best.subject_pk for best in named if best}) == len(named)
    for one, other in zip(before, after, strict=True):
        assert other.decision.best == one.decision.best and other.shown_thresholds == one.shown_thresholds
        assert other.decision.outcome == one.decision.outcome or (
            (one.decision.outcome, other.decision.outcome) == ("identified", "uncertain")
        )


def side_by_side(*images: NDArray[np.uint8]) -> bytes:
    tiles = [np.asarray(Image.fromarray(image).resize((400, 400))) for image in images]
    return jpeg(np.concatenate(tiles, axis=1))


def test_two_people_of_a_photo_are_not_one(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, risk={"threshold": -0.5})
    kith.enroll(gallery, "ada", jpeg(astronaut), face="largest")
    photo = side_by_side(actor, astronaut)

    def asked(once: bool | None = None) -> list[tuple[str, list[str], int | None]]:
        photos = photo, jpeg(astronaut)
        results = kith.identify(gallery, *photos, check_quality=False, one_face_per_person=once).results
        return [(r.outcome, r.reasons, r.other_face) for r in results]

    once, freely = asked(), asked(False)
    assert {outcome for outcome, *_ in freely} == {"identified"}
    best = next(i for i, (outcome, *_) in enumerate(once) if outcome == "identified")
    assert [outcome for outcome, *_ in once].count("identified") == 2  # the other photo is apart
    assert once[-1] == ("identified", [], None)
    assert {(o, tuple(r), at) for o, r, at in once[:-1] if o != "identified"} == {("uncertain", (ELSEWHERE,), best)}
    kith.update_gallery(gallery, one_face_per_person=False)
    assert asked() == freely
    assert asked(True) == once
