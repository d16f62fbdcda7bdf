"""A person is identified in one face of a photo, no face more is identified, and no number gets more favorable."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from models.risk.calibration import Calibration
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.outcomes import RiskTarget
from service.risk.decision import decide, score_candidates
from service.risk.one_face import ELSEWHERE, one_face_per_person
from service.risk.search import Identification
from service.risk.threshold import Candidate, ImpostorRisk, SearchRisk, Thresholds, thresholds_for
from tests.conftest import jpeg

AT = Thresholds(accept=0.5, review=0.4, source="pack", extrapolated=False)
ADA, BO, CY = 1, 2, 3
PHOTOS = 400
FPIR = 0.05


def answer(**similarities: float) -> Identification:
    """Answer with fixed thresholds, best first."""
    keys = {"ada": ADA, "bo": BO, "cy": CY}
    ranked = [Candidate(keys[name], s, s) for name, s in similarities.items()]
    return Identification(decide(ranked, AT), ranked, AT)


@pytest.mark.parametrize(
    ("faces", "outcomes", "other_faces"),
    [
        # The better face keeps the person. The other becomes nobody else.
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
        assert other.decision.best == one.decision.best and other.shown_thresholds == one.shown_thresholds
        assert other.reasons == (() if other.other_face is None else (ELSEWHERE,))
        assert other.other_face is not None or other == one


def simulated(
    calibration: Calibration, rng: np.random.Generator, gallery: Float, probes: NDArray[np.floating]
) -> list[Identification]:
    """Answers of a search of everyone, whose scores are rival-adjusted."""
    subjects = len(gallery)
    search = SearchRisk(calibration.curve, 0.25, subjects - 1)
    model = ImpostorRisk(calibration.curve, "pack", search=search, pack=calibration)
    thresholds = thresholds_for(RiskTarget("fpir", FPIR), model, subjects)
    answers = []
    for row in probes @ gallery.T:
        hits = [(int(i), float(row[i])) for i in np.argsort(-row)[:5]]
        ranked = score_candidates(hits, thresholds, model, subjects)
        answers.append(Identification(decide(ranked, thresholds), ranked, thresholds, model, subjects))
    return answers


def test_no_more_strangers_and_fewer_wrong_names_in_group_photos(
    calibration: Calibration, rng: np.random.Generator
) -> None:
    """Photos of four enrolled people, their sisters and two strangers, with scores about as the calibration's."""
    gallery = l2_normalize(rng.normal(size=(100, 100)))
    counts: Counter[str] = Counter()
    for _ in range(PHOTOS):
        present = rng.choice(100, 4, replace=False)
        sisters = 0.5 * gallery[present[:2]] + 0.1 * rng.normal(size=(2, 100))
        faces = [*(gallery[present] + 0.1 * rng.normal(size=(4, 100))), *sisters, *rng.normal(size=(2, 100))]
        probes = l2_normalize(np.array(faces))
        before = simulated(calibration, rng, gallery, probes)
        after = one_face_per_person(before)
        assert after == one_face_per_person(before)
        owners = [*present.tolist(), *[-1] * 4]
        named = [a.decision.best.subject_pk for a in after if a.decision.outcome == "identified" and a.decision.best]
        assert len(set(named)) == len(named)
        for one, other, owner in zip(before, after, owners, strict=True):
            assert one.decision.best is not None
            assert other.decision.best is not None
            assert other.shown_thresholds == one.shown_thresholds
            if other.decision.outcome == "identified":
                assert one.decision.outcome == "identified"
                assert other.decision.best.similarity >= other.shown_thresholds.accept
                assert other.shown_probability(other.decision.best) == one.shown_probability(one.decision.best)
            for when, a in (("before", one), ("after", other)):
                if a.decision.outcome == "identified" and a.decision.best is not None:
                    right = a.decision.best.subject_pk == owner
                    counts[f"{'right' if right else 'wrong' if owner >= 0 else 'strangers'} {when}"] += 1
    assert counts["strangers before"] > 100
    assert counts["strangers after"] < 0.2 * counts["strangers before"]
    assert counts["right after"] > 0.99 * counts["right before"]
    assert counts["wrong after"] - counts["wrong before"] < 0.005 * counts["right before"]


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
