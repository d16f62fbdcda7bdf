"""Impostor evidence of galleries: derived from their templates, stored in SQL, and shared by all processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from cachetools import LRUCache

from kith.wire.common import Source
from models.risk.calibration import Calibration
from models.risk.gallery_risk import GalleryRisk, min_supported_fmr
from service.core.errors import GalleryMovedError, GalleryNotFoundError, RiskUncalibratedError
from service.domain.gallery import Gallery, StoredEvidence
from service.risk.evidence import impostor_evidence
from service.risk.threshold import ImpostorRisk, SearchRisk, thresholds_for
from service.storage.repositories.store import Store

STALE_SHARE: Final = 0.02
"""Share of templates added or removed after which the evidence is derived again."""
MAX_CACHED: Final = 1000
"""Galleries in the cache, about 80 kB each, and 16 bytes for each subject."""
MIN_SUBJECTS: Final = 2
MIN_SUBJECTS_UNCALIBRATED: Final = 50
"""Subjects needed to estimate the tail if the pack has no calibration."""
log = logging.getLogger(__name__)


class GalleryRisks:
    """Risk models of galleries, from their own evidence and the calibration of their pack.

    ``calibrations``: calibrations of served packs by recognizer fingerprint; None for an uncalibrated pack.

    A background thread derives stale evidence, at most MAX_PROBES searches each time. Until it is done, decisions use
    the previous evidence with the current number of subjects.
    """

    def __init__(self, store: Store, calibrations: Mapping[str, Calibration | None]) -> None:
        self._store = store
        self._calibrations = dict(calibrations)
        self._of_packs = {f: None if c is None else _pack_risk(c) for f, c in calibrations.items()}
        self._models: LRUCache[tuple[int, int], tuple[int, ImpostorRisk | None]] = LRUCache(MAX_CACHED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="risk")
        self._waiting: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._deriving = threading.Lock()

    def close(self) -> None:
        """Finish the running derivation. Queued ones run after the next start."""
        self._thread.shutdown(cancel_futures=True)

    def calibration(self, gallery: Gallery) -> Calibration | None:
        """Return the calibration of the gallery's pack."""
        return self._calibrations.get(gallery.fingerprint)

    def require_calibration(self, gallery: Gallery) -> Calibration:
        """Return the calibration of the gallery's pack. Raises RiskUncalibratedError."""
        if (found := self.calibration(gallery)) is None:
            remedy = "Calibrate the pack: kith models calibrate PACK --photos FOLDER."
            raise RiskUncalibratedError(f"the pack of gallery {gallery.name!r} has no calibration", remedy)
        return found

    def of_pack(self, fingerprint: str) -> ImpostorRisk | None:
        """Return the risk model of a served pack."""
        return self._of_packs.get(fingerprint)

    def current(self, gallery: Gallery) -> ImpostorRisk | None:
        """Return the current risk model; None: neither pack nor gallery has enough data."""
        if gallery.evidence_sequence is None:
            if gallery.subjects >= MIN_SUBJECTS:
                self.derive_later(gallery)
            return self.with_pack(gallery, None)
        derived, model = self._cached(gallery)
        if derived != gallery.evidence_sequence:
            stored = self._store.evidence.get(gallery)
            if stored is None:
                return self.with_pack(gallery, None)
            self.derive_later(gallery)  # an earlier process may have ended before it derived the evidence
            model = self.with_pack(gallery, self.fit(gallery, stored))
            if model is not None and model.source != "pack":
                model = replace(model, mean_templates=max(1.0, stored.templates / stored.evidence.subjects))
            with self._lock:
                self._models[_key(gallery)] = (stored.sequence, model)
        return model

    def is_cached(self, gallery: Gallery) -> bool:
        """Return whether :meth:`current` can answer without I/O."""
        return gallery.evidence_sequence in (None, self._cached(gallery)[0])

    def _cached(self, gallery: Gallery) -> tuple[int, ImpostorRisk | None]:
        """Return the cached model, and the sequence of its evidence; -1 without one."""
        with self._lock:
            return self._models.get(_key(gallery)) or (-1, None)

    def with_pack(self, gallery: Gallery, risk: GalleryRisk | None) -> ImpostorRisk | None:
        """Return the risk model of pack and gallery combined."""
        of_pack = self.of_pack(gallery.fingerprint)
        if risk is None:
            return of_pack
        return impostor_risk(risk, "gallery" if of_pack is None else "both")

    def fit(self, gallery: Gallery, stored: StoredEvidence | None) -> GalleryRisk | None:
        """Return the gallery's own risk model; None: too little evidence."""
        calibration = self.calibration(gallery)
        fewest = MIN_SUBJECTS_UNCALIBRATED if calibration is None else MIN_SUBJECTS
        if stored is None or stored.evidence.subjects < fewest:
            return None
        return GalleryRisk(stored.evidence, calibration)

    def derive_later(self, gallery: Gallery) -> None:
        """Queue a derivation if the evidence may be stale; return at once. Ignores recognizers that are not served."""
        with self._lock:
            named = gallery.name, gallery.generation
            if named in self._waiting or gallery.fingerprint not in self._calibrations:
                return
            self._waiting.add(named)
        try:
            self._thread.submit(self._derive, *named)
        except RuntimeError:  # closing; the next start derives it
            log.debug("risk of gallery %s is not derived: the service is closing", gallery.name)

    def forget(self, gallery: Gallery) -> None:
        """Evict a deleted gallery from the cache."""
        with self._lock:
            for key in [key for key in self._models if key[0] == gallery.pk]:
                del self._models[key]

    def refresh(self, name: str, exact: bool = False, generation: int | None = None) -> StoredEvidence:
        """Derive a gallery's evidence if it is stale; return the stored evidence.

        Args:
            exact: also derive it if any template changed.
            generation: generation of vectors to use; default: the current one.

        Raises:
            GalleryNotFoundError: there is no such gallery.
            GalleryMovedError: this generation does not exist, or the gallery moved to another recognizer meanwhile.
            StorageError: the database cannot be read or written.
        """
        with self._deriving:
            gallery = self._store.galleries.get(name)
            if generation is not None:
                gallery = gallery.at_generation(generation)
            stored = self._store.evidence.get(gallery)
            if stored is not None and not self.is_stale(gallery, stored, 0.0 if exact else STALE_SHARE):
                return stored
            snapshot = self._store.changes.snapshot(gallery, of_people=True)
            scores = impostor_evidence(snapshot)
            templates = len(snapshot.template_pks)
            new = StoredEvidence(snapshot.sequence, templates, scores, datetime.now(UTC))
            # Both use the current risk target, so that a difference comes from the evidence alone.
            before, after = self._described(gallery, stored), self._described(gallery, new)
            target = gallery.settings.risk
            moved: dict[str, Any] = {"risk": {target.kind: target.value}, "before": before, "after": after}
            moved["reason"] = _reason(stored, new)
            if gallery.generation != gallery.current_generation:
                moved["recognizer"] = gallery.fingerprint  # not the generation that answers requests
            has_moved = _shown(before) != _shown(after) and target.kind != "threshold"
            self._store.evidence.put(gallery, new, moved if has_moved else None)
            return new

    def is_stale(self, gallery: Gallery, stored: StoredEvidence, share: float = STALE_SHARE) -> bool:
        """Return whether the evidence must be derived again.

        That is so if more than this share of templates changed, or the trimmed log cannot tell.
        """
        if stored.sequence < gallery.log_floor:
            return True
        most = int(share * stored.templates)
        return self._store.changes.count_lags({gallery.pk: stored.sequence}, most + 1)[gallery.pk] > most

    def _derive(self, name: str, generation: int) -> None:
        with self._lock:
            self._waiting.discard((name, generation))
        try:
            self.refresh(name, generation=generation)
        except (GalleryNotFoundError, GalleryMovedError):
            pass  # deleted or moved meanwhile; the next search handles it
        except Exception:  # no caller waits for this thread, so the log is the only report
            log.exception("deriving the risk of gallery %s failed; the previous one stays in use", name)

    def _described(self, gallery: Gallery, stored: StoredEvidence | None) -> dict[str, Any] | None:
        """Return the threshold of the gallery's own risk and its basis, for the audit."""
        if stored is None:
            return None
        risk = self.fit(gallery, stored)
        model = self.with_pack(gallery, risk)
        if model is None:
            return None
        thresholds = thresholds_for(gallery.settings.risk, model, stored.evidence.subjects)
        return {
            "threshold": round(thresholds.accept, 4),
            "source": thresholds.source,
            "extrapolated": thresholds.extrapolated,
            "subjects": stored.evidence.subjects,
            "templates": stored.templates,
            "pairs": stored.evidence.pair_count,
            "gallery_share": round(risk.gallery_share, 4) if risk else 0.0,
            "duplicate_pairs": round(risk.duplicate_pairs, 1) if risk else 0.0,
        }


def _shown(described: dict[str, Any] | None) -> float | None:
    """Return a threshold in the digits that people see. A smaller difference is no move."""
    return None if described is None else round(described["threshold"], 3)


def _reason(before: StoredEvidence | None, after: StoredEvidence) -> str:
    """Return why the threshold moved, for the audit."""
    if before is None:
        return "The first estimate from the photos of this gallery."
    then, now = before.evidence.subjects, after.evidence.subjects
    if then != now:
        return f"{'More' if now > then else 'Fewer'} people are enrolled: {now:,} instead of {then:,}."
    return "Photos of enrolled people were added or removed."


def _pack_risk(calibration: Calibration) -> ImpostorRisk:
    least = min_supported_fmr(calibration.impostor_pairs)
    return ImpostorRisk(calibration.curve, "pack", min_fmr=least, pack=calibration)


def impostor_risk(risk: GalleryRisk, source: Source) -> ImpostorRisk:
    """Return the risk model for decisions in a gallery."""
    evidence, search = risk.evidence, None
    if evidence.rival is not None:
        search = SearchRisk(risk.curve, evidence.rival, evidence.subjects - 1, evidence.levels)
    return ImpostorRisk(risk.raw_curve, source, search=search, min_fmr=risk.min_fmr, pack=risk.pack)


def _key(gallery: Gallery) -> tuple[int, int]:
    return gallery.pk, gallery.generation
