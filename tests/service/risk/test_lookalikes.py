"""Linked people are named only if one clearly leads, and links end with either person."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from kith import AsyncKith, Kith, KithClientError
from kith.wire.fields import MAX_LOOKALIKES
from models.risk.calibration import Calibration, fit_tail, histogram
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.outcomes import RiskTarget
from service.risk.decision import Candidate, ImpostorRisk, Thresholds, decide, thresholds_for
from service.risk.known_strangers import RANKS
from service.risk.lookalikes import LOOKALIKES, Linked, tell_apart
from service.risk.search import Identification
from tests.commands import run_kith
from tests.packs import BUNDLED_DIMENSION

ADA, GRACE, CY = 1, 2, 3
FPIR = RiskTarget("fpir", 0.01)
MANY = 10**6
"""Templates, so that their mean similarity is certain."""


def answer(calibration: Calibration, best: float) -> Identification:
    model = ImpostorRisk(calibration.curve, "pack", pack=calibration)
    thresholds = thresholds_for(FPIR, model, 5)
    ranked = [Candidate(ADA, best, 1e-6, best)]
    return Identification(decide(ranked, thresholds), ranked, thresholds, model, 5, ranked=ranked)


def test_the_lead_that_is_enough_follows_from_the_risk(calibration: Calibration) -> None:
    """Mates are N(0.6, 0.15), a lookalike's similarities N(0.4, 0.15): the odds are those of the densities."""
    own, twin = answer(calibration, 0.6), [Linked(GRACE, 0.3, 0.4, MANY)]
    one, other = norm(0.6, 0.15), norm(0.4, 0.15)
    odds = one.pdf(0.6) * other.pdf(0.3) / (other.pdf(0.6) * one.pdf(0.3))
    told = tell_apart(own, twin, RiskTarget("fpir", 1e-5))
    assert told.decision.outcome == "uncertain"
    assert told.reasons == (LOOKALIKES,)
    assert [one.subject_pk for one in told.lookalikes] == [ADA, GRACE]
    second = told.lookalikes[1].probability
    assert second is not None
    assert second == pytest.approx(1 / (1 + odds), rel=0.03)
    assert sum(one.probability or 0 for one in told.lookalikes) == pytest.approx(1)
    assert tell_apart(own, twin, RiskTarget("fpir", 1.1 * second)) == own
    assert tell_apart(own, [Linked(GRACE, -0.1, 0.3, MANY)], FPIR) == own


def test_twins_need_a_larger_lead_than_cousins(calibration: Calibration) -> None:
    own = answer(calibration, 0.6)

    def second(to_best: float) -> float:
        told = tell_apart(own, [Linked(GRACE, 0.4, to_best, MANY)], RiskTarget("fpir", 1e-9))
        return told.lookalikes[1].probability or 0.0

    assert second(0.1) == second(0.25)  # at least halfway between strangers and one person
    assert second(0.25) < second(0.4) < second(0.5) < second(0.9)
    assert second(0.9) == pytest.approx(0.5)
    few = tell_apart(own, [Linked(GRACE, 0.4, 0.4, 1)], RiskTarget("fpir", 1e-9)).lookalikes[1].probability
    assert few is not None
    assert few > second(0.4)  # one template says less about how alike they are


def test_the_nearer_one_is_listed_first_and_all_are(calibration: Calibration) -> None:
    linked = [Linked(GRACE, 0.7, 0.5, MANY), Linked(CY, 0.5, 0.5, MANY)]
    told = tell_apart(answer(calibration, 0.6), linked, FPIR)
    assert [one.subject_pk for one in told.lookalikes] == [GRACE, ADA, CY]
    assert sum(one.probability or 0 for one in told.lookalikes) == pytest.approx(1)


def test_nothing_becomes_identified(calibration: Calibration) -> None:
    for best in (0.1, 0.25, 0.3, 0.5):
        before = answer(calibration, best)
        for near in (best - 0.3, best - 0.1, best):
            after = tell_apart(before, [Linked(GRACE, near, 0.5)], FPIR)
            ranks = [RANKS.index(one.decision.outcome) for one in (before, after)]
            assert ranks[1] <= ranks[0]
            assert after.shown_thresholds == before.shown_thresholds
            assert after.decision.best == before.decision.best


def test_without_a_calibration_no_lookalike_may_reach_the_review_threshold() -> None:
    at = Thresholds(0.5, 0.4, "explicit", False)
    ranked = [Candidate(ADA, 0.6, None, 0.6)]
    own = Identification(decide(ranked, at), ranked, at, ranked=ranked)
    told = tell_apart(own, [Linked(GRACE, 0.41, 0.5), Linked(CY, 0.39, 0.5)], FPIR)
    assert [(one.subject_pk, one.probability) for one in told.lookalikes] == [(ADA, None), (GRACE, None)]
    assert tell_apart(own, [Linked(GRACE, 0.39, 0.5)], FPIR) == own


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_mistaken_twins_keep_the_risk(share: float) -> None:
    """The twins' mean embeddings have this cosine; templates and probes have independent noise."""
    rng, n, people, risk = np.random.default_rng(3), 256, 4000, 0.01
    common = rng.normal(size=(people, n))
    twins = [
        l2_normalize(np.sqrt(share) * common + np.sqrt(1 - share) * rng.normal(size=common.shape)) for _ in range(2)
    ]

    def photo(of: NDArray[np.floating]) -> Float:
        return l2_normalize(of + 1.2 * rng.normal(size=of.shape) / np.sqrt(n))

    template, other, probe, again = photo(twins[0]), photo(twins[1]), photo(twins[0]), photo(twins[0])
    own, twin, to_best = (probe * template).sum(1), (probe * other).sum(1), (template * other).sum(1)
    strangers = (probe[:, None] * template[rng.integers(0, people, (people, 20))]).sum(2).ravel()
    mates = (again * template).sum(1)
    genuine = histogram(np.concatenate([own, mates]))
    start = float(np.quantile(strangers, 0.999))
    beyond = strangers[strangers > start] - start
    calibration = Calibration(histogram(strangers), genuine, fit_tail(beyond, np.ones(len(beyond)), start, 0.001))
    wrong = named = 0
    for ada, grace, alike in zip(own, twin, to_best, strict=True):
        best, second = max(ada, grace), min(ada, grace)
        told = tell_apart(answer(calibration, float(best)), [Linked(GRACE, float(second), float(alike))], FPIR)
        if told.decision.outcome == "identified":
            named += 1
            wrong += grace > ada
    assert wrong <= 1.5 * risk * people
    mistaken = int((twin > own).sum())
    assert mistaken > 0
    assert wrong <= min(risk * people, 5 * risk * named, 0.05 * mistaken)
    assert named > {0.5: 0.5, 0.7: 0.3, 0.9: 0.01}[share] * people


@pytest.fixture
def twins(kith: Kith, gallery: str) -> dict[str, Float]:
    """Twelve people; Ada and Grace resemble each other."""
    rng = np.random.default_rng(8)
    faces = {f"s{i}": l2_normalize(rng.normal(size=BUNDLED_DIMENSION)) for i in range(10)}
    faces["ada"] = l2_normalize(rng.normal(size=BUNDLED_DIMENSION))
    faces["grace"] = l2_normalize(faces["ada"] + 0.9 * l2_normalize(rng.normal(size=BUNDLED_DIMENSION)))
    for name, vector in faces.items():
        kith.enroll(gallery, name, embeddings=[vector], allow_duplicate=True)
    kith.update_subject(gallery, "grace", name="Grace Hopper")
    return faces


def test_a_face_near_both_is_one_of_them(kith: Kith, gallery: str, twins: dict[str, Float]) -> None:
    probe = l2_normalize(twins["ada"] + 0.1 * twins["grace"])

    def asked(top_k: int = 5) -> tuple[str, list[str], list[str]]:
        (result,) = kith.identify(gallery, embeddings=[probe], risk={"threshold": 0.75}, top_k=top_k).results
        if result.lookalikes:
            assert [one.name for one in result.lookalikes] == [None, "Grace Hopper"]
            assert sum(one.probability or 0 for one in result.lookalikes) == pytest.approx(1, abs=1e-3)
        return result.outcome, result.reasons, [one.subject for one in result.lookalikes]

    alone = asked()
    assert alone == ("identified", [], [])
    assert [one.id for one in kith.link_lookalikes(gallery, "ada", "grace")] == ["grace"]
    assert [one.id for one in kith.link_lookalikes(gallery, "grace", "ada")] == ["ada"]  # once
    assert [one.id for one in kith.lookalikes(gallery, "grace")] == ["ada"]
    assert asked() == asked(top_k=1) == ("uncertain", [LOOKALIKES], ["ada", "grace"])
    (far,) = kith.identify(gallery, embeddings=[twins["s1"]]).results
    assert (far.outcome, far.lookalikes) == ("identified", [])
    assert kith.unlink_lookalikes(gallery, "grace", "ada") == []
    assert kith.unlink_lookalikes(gallery, "grace", "ada") == []
    assert asked() == alone


def test_a_filter_without_the_twin_is_the_callers_decision(kith: Kith, gallery: str, twins: dict[str, Float]) -> None:
    kith.link_lookalikes(gallery, "ada", "grace")
    kith.update_subject(gallery, "ada", tags=["present"])
    probe = [twins["ada"]]
    (result,) = kith.identify(gallery, embeddings=probe, risk={"threshold": 0.75}, filter={"tags": ["present"]}).results
    assert (result.subject, result.lookalikes) == ("ada", [])


def test_links_end_with_either_person(kith: Kith, gallery: str, twins: dict[str, Float]) -> None:
    kith.link_lookalikes(gallery, "ada", "grace")
    kith.link_lookalikes(gallery, "ada", "s1")
    exported = kith.export_subject(gallery, "grace")
    (other,) = exported["lookalikes"]
    assert other["pseudonym"] == kith.export_subject(gallery, "ada")["pseudonym"]
    assert kith.delete_subject(gallery, "grace").receipt.removed["lookalikes"] == 1
    assert [one.id for one in kith.lookalikes(gallery, "ada")] == ["s1"]
    kith.merge_subject(gallery, "s1", "s2")
    assert [one.id for one in kith.lookalikes(gallery, "s2")] == ["ada"]
    kith.merge_subject(gallery, "s2", "ada")
    assert kith.lookalikes(gallery, "ada") == []
    assert len(list(kith.audit(gallery, event="subject_linked"))) == 2


def test_wrong_links_are_refused(kith: Kith, gallery: str, twins: dict[str, Float]) -> None:
    with pytest.raises(KithClientError, match="other"):
        kith.link_lookalikes(gallery, "ada", "ada")
    with pytest.raises(KithClientError) as missing:
        kith.link_lookalikes(gallery, "ada", "nobody")
    assert missing.value.code == "subject_not_found"
    for i in range(MAX_LOOKALIKES):
        kith.link_lookalikes(gallery, "ada", f"s{i}")
    with pytest.raises(KithClientError, match="10 lookalikes"):
        kith.link_lookalikes(gallery, "grace", "ada")
    assert kith.lookalikes(gallery, "grace") == []


def test_the_asynchronous_client_and_the_command_line_link(
    kith: Kith, gallery: str, server: str, twins: dict[str, Float], tmp_path: Path
) -> None:
    async def linked() -> list[str]:
        async with AsyncKith(server) as client:
            return [one.id for one in await client.link_lookalikes(gallery, "ada", "s3")]

    def run(*words: str) -> str:
        done = run_kith("subject", *words, "--gallery", gallery, "--url", server, cwd=tmp_path, environment={})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert asyncio.run(linked()) == ["s3"]
    assert "Lookalikes of ada: s3, grace" in run("link", "ada", "grace")
    assert "Lookalikes: s3, grace" in run("show", "ada")
    assert "Lookalikes of ada: s3" in run("unlink", "ada", "grace")
