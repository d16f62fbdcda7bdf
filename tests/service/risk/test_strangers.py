"""The rule of clustering: a face is taken for a remembered stranger at the stated risk, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from models.risk.calibration import Calibration, FmrCurve
from models.runtime.network import Float
from service.core.errors import RiskUncalibratedError
from service.domain.fusion import fuse_similarities
from service.domain.gallery import GallerySettings
from service.domain.outcomes import RiskTarget
from service.domain.strangers import MAX_TEMPLATES, Nearest, Recalled
from service.risk.strangers import recall
from service.risk.threshold import ImpostorRisk, SearchRisk, thresholds_for

DIMENSION = 64
EXPLICIT = GallerySettings(risk=RiskTarget("threshold", 0.5))
ONE_PERCENT = GallerySettings(risk=RiskTarget("fpir", 0.01))
MET = "met", "diverse"


def nearest_of(vector: Float, *people: Float) -> Nearest:
    """Return the nearest of ``people``, (n, d) templates each, to a face."""
    vectors, owners = np.concatenate(people), np.repeat(np.arange(len(people)), [len(one) for one in people])
    (similarities,) = fuse_similarities(vector[None], vectors, owners, np.full(len(vectors), 0.5, np.float32))
    best = int(similarities.argmax())
    return Nearest(best, float(similarities[best]), len(people), len(vectors) / len(people), lambda: people[best])


def judged(vector: Float, people: Sequence[Float], model: ImpostorRisk | None, settings: GallerySettings) -> Recalled:
    return recall(vector, nearest_of(vector, *people), model, settings)


def at(similarity: float, axis: int = 0) -> Float:
    """Return a unit vector with this similarity to the axis."""
    vector = np.zeros(DIMENSION, np.float32)
    vector[[axis, DIMENSION - 1]] = similarity, np.sqrt(1 - similarity**2)
    return vector


def axes(*numbers: int) -> list[Float]:
    return [np.eye(DIMENSION, dtype=np.float32)[[number]] for number in numbers]


def risk(calibration: Calibration) -> ImpostorRisk:
    return ImpostorRisk(calibration.curve, "pack", pack=calibration)


def test_the_first_face_is_new_and_the_most_similar_stranger_is_met() -> None:
    assert recall(at(1.0), None, None, EXPLICIT) == "new"
    known = axes(0, 1, 2)
    assert judged(at(0.9, 1), known, None, EXPLICIT) == "met"
    assert judged(at(0.4, 1), known, None, EXPLICIT) == "new"
    with pytest.raises(RiskUncalibratedError):  # a rate cannot be kept
        judged(at(0.9), known, None, ONE_PERCENT)


def test_a_face_between_the_thresholds_founds_nobody(calibration: Calibration) -> None:
    model, settings = risk(calibration), replace(ONE_PERCENT, review_factor=10.0)
    limits = thresholds_for(settings.risk, model, 2, 10.0)
    known = axes(0, 1)
    middle = (limits.accept + limits.review) / 2
    assert judged(at(middle), known, model, settings) == "unclear"
    assert judged(at(middle), known, model, replace(settings, review_factor=1.0)) == "new"
    assert judged(at(limits.review - 0.01), known, model, settings) == "new"
    assert judged(at(limits.accept + 0.01), known, model, settings) in MET


def test_more_strangers_and_more_templates_need_more_similarity(calibration: Calibration) -> None:
    model = risk(calibration)
    few, many = axes(0, 1), axes(*range(60))
    similarity = thresholds_for(ONE_PERCENT.risk, model, 2).accept + 1e-3
    assert similarity < thresholds_for(ONE_PERCENT.risk, model, 60).accept
    assert judged(at(similarity), few, model, ONE_PERCENT) in MET
    assert judged(at(similarity), many, model, ONE_PERCENT) not in MET
    twice = [np.repeat(one, 4, axis=0) for one in axes(0, 1)]
    assert judged(at(similarity), twice, model, ONE_PERCENT) not in MET


def test_a_second_id_of_the_same_person_does_not_hide_the_first(calibration: Calibration) -> None:
    """The runner-up does not count against the best: both may be one person."""
    plain = risk(calibration)
    among_rivals = FmrCurve(np.sqrt(calibration.curve.rates), calibration.curve.variances, 1.0)
    adjusted = replace(plain, search=SearchRisk(among_rivals, 0.1, 100))
    known, face = axes(*range(60)), at(thresholds_for(ONE_PERCENT.risk, plain, 60).accept + 1e-3)
    assert thresholds_for(ONE_PERCENT.risk, adjusted, 60).accept > face[0]
    assert judged(face, known, plain, ONE_PERCENT) in MET
    assert judged(face, known, adjusted, ONE_PERCENT) in MET


def test_only_diverse_faces_become_templates_and_only_a_few(calibration: Calibration) -> None:
    model = risk(calibration)
    known = axes(0, 1)
    accept = thresholds_for(ONE_PERCENT.risk, model, 2).accept
    assert accept < calibration.mean_genuine
    unlike, alike = (accept + calibration.mean_genuine) / 2, calibration.mean_genuine + 0.01
    assert judged(at(unlike), known, model, ONE_PERCENT) == "diverse"
    assert judged(at(alike), known, model, ONE_PERCENT) == "met"
    full = [np.repeat(axes(0)[0], MAX_TEMPLATES, axis=0), *axes(*range(1, MAX_TEMPLATES))]
    found = judged(at(calibration.mean_genuine - 1e-3), full, model, ONE_PERCENT)
    assert found == "met"
