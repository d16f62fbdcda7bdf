"""The open-set benchmark draws the documented galleries, and its ratios are those of the service's decisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.open_set import (
    Row,
    calibration_of,
    goals,
)
from bench.risk_photos import QUALITY, SAME_PEOPLE, Faces, rows_of, with_one_name
from bench.risk_trials import FPIR, Domain, draws, equal_weights, identified, judge, risk_of, search
from models.pack.manifest import ModelPack
from models.risk.impostor_evidence import RIVAL_WEIGHT
from models.vision.recognition import l2_normalize
from service.domain.fusion import fuse_similarities
from service.domain.outcomes import RiskTarget
from service.risk.search import DEPTH
from service.risk.threshold import thresholds_for
from tests.packs import BUNDLED_DIMENSION

SIMULATED = Domain("simulated", "LFW", "faces", "faces", "faces", ((1, (40, 100)), (2, (40,))))


def simulated(rng: np.random.Generator, several: int = 120, strangers: int = 1500) -> dict[str, Faces]:
    """Photos of 120 people, four each, and strangers from the same distribution."""
    centers = l2_normalize(rng.normal(size=(several, BUNDLED_DIMENSION)) + 1.4)
    own = np.repeat(centers, 4, axis=0) + 0.03 * rng.normal(size=(4 * several, BUNDLED_DIMENSION))
    vectors = l2_normalize(np.concatenate([own, l2_normalize(rng.normal(size=(strangers, BUNDLED_DIMENSION)) + 1.4)]))
    people = [*np.repeat([f"own{i}" for i in range(several)], 4), *(f"stranger{i}" for i in range(strangers))]
    photos = [f"{'side' if i % 4 == 3 else 'front'}/{i}" for i in range(len(people))]
    quality = rng.uniform(0.3, 1, (len(people), len(QUALITY))).astype(np.float32)
    return {"faces": Faces(vectors, np.array(people), np.array(photos), quality)}


def row(**changes: object) -> Row:
    ordinary = Row("kith-compact", "LFW", "LFW", 2, 300, 0.01, 0.8, 1.1, 1.5, 0.2, 0.2, 0.19, 0.22)
    return replace(ordinary, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("domain", [SIMULATED, replace(SIMULATED, mated_view="side", strangers_view="side")])
def test_enrolled_photos_probes_and_strangers_are_different(domain: Domain, rng: np.random.Generator) -> None:
    sets = simulated(rng)
    faces = sets["faces"]
    by_vector = {vector.tobytes(): i for i, vector in enumerate(faces.vectors)}
    for draw in draws(sets, domain, 2, 40, 2, 0):
        enrolled = np.array([by_vector[vector.tobytes()] for vector in draw.snapshot.vectors])
        mated, strangers = (
            np.array([by_vector[vector.tobytes()] for vector in probes]) for probes in (draw.mated, draw.strangers)
        )
        assert not set(enrolled) & set(mated)
        assert len(enrolled) == 80
        assert set(faces.people[enrolled]).isdisjoint(faces.people[strangers])
        assert (faces.people[enrolled[::2]][draw.mates] == faces.people[mated]).all()
        assert (faces.people[strangers] == draw.persons).all()
        if domain.mated_view:
            assert all(photo.startswith("side") for photo in faces.photos[np.concatenate([mated, strangers])])


def test_ratios_are_of_what_the_service_decides(pack: ModelPack, rng: np.random.Generator) -> None:
    (draw,) = draws(simulated(rng), SIMULATED, 2, 60, 1, 0)
    outcomes = judge(draw, calibration_of(pack))
    assert [outcome.fpir for outcome in outcomes] == list(FPIR)
    assert {(outcome.templates, outcome.people) for outcome in outcomes} == {(2, 60)}
    _, known = risk_of(draw.snapshot, calibration_of(pack))
    held = draw.snapshot.vectors, draw.snapshot.subject_pks, draw.snapshot.qualities
    similarities, rival = fuse_similarities(draw.strangers, *held), known.rival_of(60)
    assert known.search is not None and known.search.levels is not None and rival is not None
    levels = known.search.levels.of(range(60))
    for outcome in outcomes:
        thresholds = thresholds_for(RiskTarget("fpir", outcome.fpir), known, 60)
        named = identified(search(draw.snapshot, draw.strangers), thresholds, known, 60) >= 0
        assert outcome.measured_fpir == pytest.approx(named.mean())
        assert thresholds.of_scores
        leveled = np.where(similarities >= np.sort(similarities)[:, -DEPTH, None], similarities - levels, -1.0)
        best, second = np.sort(leveled)[:, :-3:-1].T
        score, other = (a - RIVAL_WEIGHT * (b - rival) for a, b in ((best, second), (second, best)))
        assert (score[named] >= thresholds.accept).all()
        assert (score[~named & (other < thresholds.accept)] < thresholds.accept).all()
        assert 0 <= outcome.hindsight_fnir <= 1
        assert 0 <= outcome.fnir <= 1


def test_a_missed_goal_is_named() -> None:
    kept = [row(), row(fpir=0.1), row(fpir=0.003, ratio=0.0), row(domain="dark", group="degraded", ratio=0.2, low=0.1)]
    kept += [row(people=12, high=3.0), row(templates=1, promised_fnir=0.9)]
    assert goals(kept[:4]).count("kept in") == 5
    assert "\n- " not in goals(kept)
    for changes, expected in (
        ({"ratio": 1.41}, "kith-compact, LFW, 300 people, 2 photos, 1%: 1.41"),
        ({"high": 2.1}, ": 2.10"),
        ({"fnir": 0.215, "promised_fnir": 0.2}, "+2.5"),
        ({"promised_fnir": 0.3}, "+10.0"),
        ({"domain": "dark", "group": "degraded", "ratio": 1.6, "promised_fnir": 0.9}, "1.60"),
    ):
        (missed,) = [line for line in goals([row(**changes)]).splitlines() if line.startswith("- ")]
        assert missed.endswith(expected)


def test_each_person_has_one_name_and_the_same_weight(rng: np.random.Generator) -> None:
    same = {row["person"]: row["same_as"] for row in rows_of(SAME_PEOPLE)}
    assert same.keys().isdisjoint(same.values()), "chains would leave two names"
    faces = simulated(rng, 2, 2)["faces"]
    renamed, unknown = next(p for p in same if same[p]), next(p for p in same if not same[p])
    found = with_one_name(replace(faces, people=np.array([*8 * [renamed], unknown, "somebody"])))
    assert found.people.tolist() == [*8 * [same[renamed]], "somebody"]
    assert (found.vectors == np.delete(faces.vectors, 8, axis=0)).all()
    weights = equal_weights(np.array(["a", "b", "b", "c", "c", "c"]))
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9])
