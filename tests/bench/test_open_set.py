"""The open-set benchmark evaluates simulated people with the service's own components."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.open_set import RAW, SOURCES, Outcome, People, draw, judge_gallery, promise, tables
from models.pack.manifest import ModelPack
from models.risk.impostor_evidence import rival_adjusted
from models.risk.tails import Floats
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.evidence import impostor_evidence
from service.domain.fusion import DEFAULT_FUSION, fuse_similarities
from service.domain.gallery import Snapshot


def simulated(rng: np.random.Generator, count: int = 120, photos: int = 5, strangers: int = 1500) -> People:
    """Photos of enrolled people, and strangers from the same distribution."""
    centers = rng.normal(size=(count, 128)) + 1.4
    own = [l2_normalize(c + 0.5 * rng.normal(size=(photos, 128))) for c in centers]
    return People(own, l2_normalize(rng.normal(size=(strangers, 128)) + 1.4))


def test_ratios_are_of_what_was_measured(pack: ModelPack, rng: np.random.Generator) -> None:
    people = simulated(rng)
    chosen = np.arange(0, 120, 2)
    outcomes = judge_gallery(pack, people, chosen, 2, 50)
    assert {(o.source, o.fpir) for o in outcomes} == {(s, f) for s in (*SOURCES, "fixed") for f in (0.1, 0.01, 0.001)}
    enrolled = np.concatenate([people.photos[i][:2] for i in chosen])
    owners, unknown = np.repeat(np.arange(len(chosen)), 2), np.full(2 * len(chosen), np.nan, np.float32)
    rival = impostor_evidence(Snapshot(0, owners, owners, enrolled, unknown), DEFAULT_FUSION).rival

    def best(probes: Float, adjusted: bool) -> Floats:
        found = np.sort(fuse_similarities(probes, enrolled, owners, unknown, DEFAULT_FUSION), axis=1)[:, ::-1]
        return np.array([rival_adjusted(row, rival if adjusted else None)[0] for row in found.tolist()])

    for outcome in outcomes:
        measured = np.mean(best(people.strangers, outcome.source not in RAW) >= outcome.threshold)
        # The rival of a search has one subject more than those of the evidence.
        assert outcome.measured_fpir == pytest.approx(measured, abs=0.02)
        assert 0 <= outcome.fnir <= 1
    # A search misses if its own subject is not first or scores below the threshold.
    strict = next(o for o in outcomes if o.source == "both" and o.fpir == 0.001)
    probes = np.concatenate([people.photos[i][2:] for i in chosen])
    similarity = fuse_similarities(probes, enrolled, owners, unknown, DEFAULT_FUSION)
    own = similarity.argmax(1) == np.repeat(np.arange(len(chosen)), 3)
    assert strict.fnir == pytest.approx(1 - np.mean(own & (best(probes, True) >= strict.threshold)), abs=0.02)


def test_a_broken_promise_is_named() -> None:
    kept = [
        Outcome(size, templates, fpir, source, 0.5, fpir * 1.1, 0.2, 0.195)
        for size in (50, 100, 200, 400, 610)
        for templates in (1, 2, 3)
        for fpir in (0.1, 0.01, 0.001)
        for source in (*SOURCES, "fixed")
    ]
    assert all(line.endswith(": kept") for line in promise(kept))
    broken = [
        Outcome(**{**vars(o), "measured_fpir": 0.03, "fnir": 0.4}) if (o.size, o.fpir) == (200, 0.01) else o
        for o in kept
    ]
    missed = promise(broken)
    assert all("200 people at 1%" in line for line in missed)
    assert "3.00" in tables("reference", broken)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    outcomes = [
        Outcome(size, 1, fpir, source, 0.5, fpir, 0.2, 0.2)
        for size in (50, 100, 200, 400, 610)
        for fpir in (0.1, 0.01)
        for source in SOURCES
    ]
    draw({"reference": outcomes}, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
