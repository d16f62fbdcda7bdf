"""A gallery's risk follows its contents, is equal in every process, and changes are audited."""

from __future__ import annotations

import itertools
import json
import uuid
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from kith import Kith
from kith.options import Risk
from kith.wire.identification import IdentityOut
from kith.wire.risk import GalleryRiskOut
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration, fmr_for_fpir, histogram
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import RIVAL_WEIGHT, rival_shift
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.domain.fusion import fuse_similarities
from service.domain.gallery import Gallery, GallerySettings, NewTemplate, Snapshot, StoredEvidence
from service.risk.evidence import MAX_PROBES, impostor_evidence
from service.risk.gallery_risks import STALE_SHARE, GalleryRisks
from service.server import embedded
from service.settings import load_settings
from service.storage.audit.log import AuditFilter, listed_lines
from service.storage.db.engine import Database
from service.storage.repositories.evidence import THRESHOLD_MOVED
from service.storage.repositories.store import Store
from tests.conftest import is_eventually
from tests.databases import open_database
from tests.packs import BUNDLED_DIMENSION

DIMENSION = BUNDLED_DIMENSION
ROUNDED = 2e-4


def people(rng: np.random.Generator, count: int, common: float = 0.25) -> Float:
    """Unit vectors that resemble each other about as the bundled recognizer's do."""
    return l2_normalize(rng.normal(size=(count, DIMENSION)) + common)


def snapshot(vectors: Float, owners: list[int]) -> Snapshot:
    order = np.argsort(owners, kind="stable")
    m = len(vectors)
    return Snapshot(m, np.arange(1, m + 1), np.array(owners)[order], vectors[order], np.full(m, np.nan, np.float32))


def enroll(kith: Kith, gallery: str, vectors: Float, first: int = 0) -> None:
    for i, vector in enumerate(vectors, start=first):
        kith.enroll(gallery, f"s{i}", embeddings=[vector], allow_duplicate=True, allow_inconsistent=True)


def usual_threshold(found: IdentityOut, report: GalleryRiskOut, enrolled: Float) -> float:
    """Return the threshold for a person of the usual level, of a search with a usual runner-up."""
    assert found.threshold is not None and found.runner_up is not None and report.rival is not None
    levels = impostor_evidence(snapshot(enrolled, list(range(len(enrolled))))).levels
    assert levels is not None
    of_best, of_runner_up = levels.of([int(one.subject[1:]) for one in (found.candidates[0], found.runner_up)])
    return found.threshold - of_best - RIVAL_WEIGHT * (found.runner_up.similarity - of_runner_up - report.rival)


# Evidence


def test_evidence_is_what_a_loop_over_subjects_finds(rng: np.random.Generator) -> None:
    owners = [int(o) for o in rng.integers(0, 15, 40)]
    taken = snapshot(people(rng, 40), owners)
    found = impostor_evidence(taken)
    subjects = np.unique(taken.subject_pks)
    probes = taken.vectors[[np.flatnonzero(taken.subject_pks == subject)[0] for subject in subjects]]
    similarities = fuse_similarities(probes, taken.vectors, taken.subject_pks, taken.qualities).astype(np.float64)
    n = len(subjects)
    others = ~np.eye(n, dtype=bool)

    def level(subject: int, without: int) -> float:
        kept = others[subject] & (np.arange(n) != without)
        return n / (n + 5) * float(np.sort(similarities[kept, subject])[-5:].mean())

    usual = float(np.median([level(subject, subject) for subject in range(n)]))
    nearest = []
    for i in range(n):
        scores = [similarities[i, j] - (level(j, i) - usual) for j in range(n) if j != i]
        nearest.append(sorted(scores)[:-3:-1])
    best, second = np.array(nearest).T
    # Similarities on the border of two bins may fall either way, as products are summed in another order.
    rival = float(np.median(best))
    assert found.rival == pytest.approx(rival)
    assert np.abs(found.pairs - histogram(similarities[others])).sum() <= 4
    assert np.abs(found.best - histogram(best - rival_shift(second, rival))).sum() <= 2
    assert found.levels is not None
    assert found.levels.values == pytest.approx([level(j, j) - usual for j in range(n)], abs=1e-6)
    assert (found.probes, found.subjects) == (len(subjects), len(subjects))


def test_a_large_gallery_is_sampled_and_a_newcomer_hardly_changes_the_sample(rng: np.random.Generator) -> None:
    vectors = people(rng, MAX_PROBES + 300)
    taken = impostor_evidence(snapshot(vectors[:-1], list(range(1, len(vectors)))))
    assert (taken.probes, taken.subjects) == (MAX_PROBES, MAX_PROBES + 299)
    assert taken.pairs.sum() == MAX_PROBES * (MAX_PROBES + 298)
    grown = impostor_evidence(snapshot(vectors, list(range(1, len(vectors) + 1))))
    assert np.abs(grown.pairs - taken.pairs).sum() < 0.01 * taken.pairs.sum()


@pytest.mark.parametrize("owners", [[], [1], [1, 1]])
def test_a_gallery_of_nobody_or_of_one_has_no_strangers(owners: list[int], rng: np.random.Generator) -> None:
    found = impostor_evidence(snapshot(people(rng, len(owners)).reshape(-1, DIMENSION), owners))
    assert found.pairs.sum() == found.best.sum() == 0


# Over HTTP


def test_searches_and_comparisons_are_decided_by_the_report(kith: Kith, gallery: str, rng: np.random.Generator) -> None:
    dozen = people(rng, 12)
    assert kith.risk(gallery).evidence.source == "pack"
    enroll(kith, gallery, dozen[:1])
    alone = kith.calibrate(gallery)
    assert (alone.evidence.source, alone.check) == ("pack", None)
    enroll(kith, gallery, dozen[1:], first=1)
    report = kith.calibrate(gallery, 0.05, 0.01)
    assert report.subject_count == 12
    assert (report.evidence.source, report.evidence.pair_count, report.evidence.up_to_date) == ("both", 66, True)
    assert [target.fpir for target in report.targets] == [0.05, 0.01]
    for target in report.targets:
        assert target.today.low <= target.today.threshold <= target.today.high
        assert target.grown.subject_count == 120
        assert target.grown.threshold > target.today.threshold
    assert report.targets[1].today.threshold == report.threshold > report.review_threshold
    assert report.most_resembled is not None
    assert 0 < report.most_resembled.level < 0.2
    assert 0 <= report.most_resembled.share < 0.5
    falling = [point.fpir for point in report.curve]
    assert falling == sorted(falling, reverse=True)
    assert all(point.low <= point.fpir <= point.high for point in report.curve)
    assert report.check is not None
    assert report.check.expected == pytest.approx(1.2)
    results = kith.identify(gallery, embeddings=list(people(rng, 5))).results
    for found in results:
        assert usual_threshold(found, report, dozen) == pytest.approx(report.threshold, abs=ROUNDED)
    assert len({found.threshold for found in results}) > 1, "each search has its own"
    assert found.risk is not None and found.risk.source == "both"
    (explicit,) = kith.identify(gallery, embeddings=[people(rng, 1)[0]], risk={"threshold": 0.7}).results
    assert explicit.risk is not None
    assert (explicit.threshold, explicit.risk.source) == (0.7, "explicit")
    kith.update_gallery(gallery, review_factor=1)
    plain = kith.risk(gallery)
    assert plain.review_threshold == plain.threshold == report.threshold

    # A face is compared with a subject as it is searched for.
    kith.enroll(gallery, "s0", embeddings=[people(rng, 1)[0]], allow_duplicate=True, allow_inconsistent=True)
    kith.update_gallery(gallery, review_factor=3)
    kith.calibrate(gallery)
    (probe,) = people(rng, 1)
    similar = {
        each.subject: each for each in kith.identify(gallery, embeddings=[probe], top_k=12).results[0].candidates
    }
    at_fmr = kith.identify(gallery, embeddings=[probe], risk={"fmr": 1e-6}).results[0]
    thresholds = []
    for subject in ("s0", "s1"):
        pair = kith.verify(probe, (gallery, subject), risk={"fmr": 1e-6})
        thresholds.append(pair.threshold or 0)
        assert pair.similarity == similar[subject].similarity
        assert pair.risk is not None and (pair.risk.fmr, pair.risk.source) == (1e-6, "both")
    assert (pair.threshold, pair.review_threshold) == (at_fmr.threshold, at_fmr.review_threshold)
    assert thresholds[0] > thresholds[1], "each of two templates is a chance"
    risks: list[tuple[Risk | None, tuple[float | None, float | None]]] = [
        (None, (0.001, None)),  # an FPIR is of a search
        ({"fmr": 1e-5}, (1e-5, None)),
        ({"threshold": 0.6}, (None, 0.6)),
    ]
    for risk, shown in risks:
        if risk is not None:
            kith.update_gallery(gallery, risk=risk)
        default = kith.verify(probe, (gallery, "s1")).risk
        assert default is not None and (default.fmr, default.threshold) == shown


def test_the_threshold_is_the_gallerys_and_follows_all_but_few_changes(
    kith: Kith, gallery: str, pack: ModelPack, rng: np.random.Generator, tmp_path: Path
) -> None:
    """A gallery with less similar people than the pack's calibration gets a lower threshold."""
    many = int(2 / STALE_SHARE)
    vectors = people(rng, many + 3, common=0.0)
    lines = [json.dumps({"subject": f"s{i}", "embedding": vector.tolist()}) for i, vector in enumerate(vectors[:many])]
    (tmp_path / "many.ndjson").write_text("\n".join(lines))
    kith.import_gallery(gallery, tmp_path / "many.ndjson", recognizer=kith.gallery(gallery).recognizer)
    assert pack.calibration is not None
    calibration = Calibration.from_document(pack.calibration)
    report, fmr = kith.calibrate(gallery), fmr_for_fpir(0.01, many)
    assert report.threshold < calibration.curve.threshold_at_fmr(fmr).value - 0.05
    expected = GalleryRisk(impostor_evidence(snapshot(vectors[:many], list(range(many)))), calibration)
    assert report.threshold == pytest.approx(expected.curve.threshold_at_fmr(fmr).value, abs=0.002)
    enroll(kith, gallery, vectors[many : many + 2], first=many)
    assert kith.risk(gallery).evidence.derived_at == report.evidence.derived_at
    assert kith.risk(gallery).evidence.up_to_date
    enroll(kith, gallery, vectors[many + 2 :], first=many + 2)
    is_eventually(lambda: kith.risk(gallery).subject_count == many + 3)


def test_evidence_follows_the_gallery_by_itself_and_each_move_is_written_down(
    kith: Kith, gallery: str, rng: np.random.Generator
) -> None:
    vectors = np.concatenate([people(rng, 8), people(rng, 6, common=0.6)])  # each of the latter moves the threshold
    enroll(kith, gallery, vectors[:8])
    is_eventually(lambda: kith.risk(gallery).subject_count == 8)
    before = kith.risk(gallery)
    enroll(kith, gallery, vectors[8:], first=8)
    is_eventually(lambda: kith.risk(gallery).subject_count == 14)
    after = kith.risk(gallery)
    assert after.threshold != before.threshold
    lines = [line for line in kith.audit(gallery) if line.event == THRESHOLD_MOVED]
    assert lines[0].details["after"]["threshold"] == after.threshold
    assert lines[0].details["after"]["pairs"] == 91
    assert lines[0].details["risk"] == {"fpir": 0.01}
    assert lines[0].details["reason"].startswith("More people are enrolled: 14 instead of ")
    assert lines[-1].details["reason"] == "The first estimate from the photos of this gallery."
    assert after.last_move is not None
    assert (after.last_move.after, after.last_move.reason) == (after.threshold, lines[0].details["reason"])
    # What one line leaves, the next one finds, but for moves too small to see.
    for later, earlier in itertools.pairwise(lines):
        left = earlier.details["after"]["threshold"]
        assert round(later.details["before"]["threshold"], 3) == round(left, 3)
    kith.delete_subject(gallery, "s0")
    is_eventually(lambda: kith.risk(gallery).subject_count == 13)


def test_a_person_enrolled_twice_in_a_small_gallery_makes_no_stranger_similar(
    kith: Kith, gallery: str, rng: np.random.Generator
) -> None:
    twice, other = people(rng, 2, common=0.0)
    enroll(kith, gallery, np.stack([twice, other]))
    before = kith.calibrate(gallery).threshold
    enroll(kith, gallery, l2_normalize(twice[None] + 0.01 * rng.normal(size=(1, DIMENSION))), first=2)
    kith.calibrate(gallery)
    (found,) = kith.identify(gallery, embeddings=[people(rng, 1, common=0.0)[0]]).results
    assert before is not None and found.threshold is not None and found.threshold > before


def test_two_processes_decide_alike_and_the_next_one_does_what_they_left_undone(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Evidence derived by one server is read by the other, which derives nothing."""
    settings = load_settings(data_dir=tmp_path, log_level="WARNING")
    vectors = people(rng, 40)
    with embedded(settings) as one, embedded(settings) as other, Kith(one) as first, Kith(other) as second:
        first.create_gallery("g")
        enroll(first, "g", vectors[:30])
        report = first.calibrate("g")
        assert second.risk("g") == first.risk("g")
        answers = [k.identify("g", embeddings=[vectors[3]]).results[0] for k in (first, second)]
        assert answers[0] == answers[1]
        assert usual_threshold(answers[0], report, vectors[:30]) == pytest.approx(report.threshold, abs=ROUNDED)
        lines = len(list(first.audit("g", event=THRESHOLD_MOVED)))
        second.risk("g")
        assert len(list(second.audit("g", event=THRESHOLD_MOVED))) == lines
    # A server that stops right after an enrollment may have no time to derive what follows from it.
    with closing(Store(open_database(settings.sql_url))) as store:
        fill(store, store.galleries.get("g"), vectors[30:], first=30)
    with embedded(settings) as url, Kith(url) as kith:
        assert kith.risk("g").subject_count == 30
        kith.identify("g", embeddings=[vectors[0]])
        is_eventually(lambda: kith.risk("g").subject_count == 40)


# In one process


def fill(store: Store, gallery: Gallery, vectors: Float, first: int = 0) -> None:
    for i, vector in enumerate(vectors, start=first):
        store.templates.enroll(gallery, f"s{i}", [NewTemplate(uuid.uuid4().hex, vector, "embedding")], None)


def test_earlier_evidence_does_not_replace_later(database: Database, store: Store, rng: np.random.Generator) -> None:
    """One process derives from an earlier state of the gallery than another one, and is done later."""
    gallery = store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings())
    taken = []
    for count in (3, 1):
        fill(store, gallery, people(rng, count), first=4 - count)
        taken.append(store.changes.snapshot(gallery))
    late, now = (
        StoredEvidence(s.sequence, len(s.template_pks), impostor_evidence(s), datetime.now(UTC)) for s in taken
    )
    store.evidence.put(gallery, now)
    store.evidence.put(gallery, late, {})
    stored = store.evidence.get(gallery)
    assert stored is not None
    assert (stored.sequence, stored.templates) == (now.sequence, 4)
    assert listed_lines(database, AuditFilter(event=THRESHOLD_MOVED), None, 10) == []


def test_a_model_is_kept_until_the_evidence_changes_or_the_gallery_goes(store: Store, rng: np.random.Generator) -> None:
    fill(store, store.galleries.create("g", "f" * 32, DIMENSION, GallerySettings()), people(rng, 60))
    with closing(GalleryRisks(store, {"f" * 32: None})) as risks:
        risks.refresh("g")
        gallery = store.galleries.get("g")
        assert not risks.is_cached(gallery)
        model = risks.current(gallery)
        assert model is not None and risks.is_cached(gallery) and risks.current(gallery) is model
        fill(store, gallery, people(rng, 3), first=60)
        risks.refresh("g")
        later = store.galleries.get("g")
        assert not risks.is_cached(later) and risks.current(later) is not model
        risks.forget(later)
        assert not risks.is_cached(later)
