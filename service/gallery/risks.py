"""What is known of each gallery's strangers: derived from SQL, stored there, and read by every process alike."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from models.gallery_risk import GalleryRisk
from models.risk import Calibration
from service.decision import KnownRisk, thresholds_for
from service.errors import GalleryMovedError, GalleryNotFoundError
from service.gallery.evidence import impostor_evidence
from service.gallery.fusion import Fusion
from service.gallery.store import Store
from service.gallery.subjects import Gallery, StoredEvidence

STALE_SHARE: Final = 0.02
"""Of a gallery's templates, how many may come or go before its evidence is derived again."""
KNOWN_AT_ONCE: Final = 1000
"""Galleries whose risk is in memory, some 80 kB each; for another one it is read and worked out again."""
FEWEST_SUBJECTS: Final = 2
FEWEST_ALONE: Final = 50
"""Subjects without whom a gallery of a pack without calibration says nothing of a tail."""
THRESHOLD_MOVED: Final = "threshold_moved"
log = logging.getLogger(__name__)


class GalleryRisks:
    """How strangers score in each gallery, by its own evidence and its pack's calibration. ``calibrations``: of the
    packs served, by their recognisers' fingerprints; None where a pack has none.

    Evidence is derived in one background thread, after the change that makes it stale was acknowledged: at most
    MAX_PROBES searches for STALE_SHARE of a gallery's templates. Until then the evidence before it decides; the number
    of subjects that a threshold is for is always today's.
    """

    def __init__(self, store: Store, calibrations: Mapping[str, Calibration | None]) -> None:
        self._store = store
        self._calibrations = dict(calibrations)
        self._of_packs = {f: None if c is None else KnownRisk(c.curve, "pack") for f, c in calibrations.items()}
        self._known: OrderedDict[tuple[int, int], tuple[int, Fusion, KnownRisk | None]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="risk")
        self._waiting: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._deriving = threading.Lock()

    def close(self) -> None:
        """Finish what is being derived; what waits is derived after the next start."""
        self._thread.shutdown(cancel_futures=True)

    def calibration(self, gallery: Gallery) -> Calibration | None:
        return self._calibrations.get(gallery.fingerprint)

    def of_pack(self, fingerprint: str) -> KnownRisk | None:
        """What a served pack's calibration says by itself."""
        return self._of_packs.get(fingerprint)

    def of(self, gallery: Gallery) -> KnownRisk | None:
        """What decisions rest on now; None: neither pack nor gallery know enough."""
        if gallery.evidence_sequence is None:
            if gallery.subjects >= FEWEST_SUBJECTS:
                self.follow(gallery)
            return self.known(gallery, None)
        fusion = gallery.settings.fusion
        with self._lock:
            *derived, known = self._known.get(_key(gallery), (-1, fusion, None))
            if _key(gallery) in self._known:
                self._known.move_to_end(_key(gallery))
        if derived != [gallery.evidence_sequence, fusion]:
            stored = self._store.evidence(gallery)
            if stored is None:
                return self.known(gallery, None)
            self.follow(gallery)  # what a process that ended left to be derived
            known = self.known(gallery, self.gallery_risk(gallery, stored))
            if known is not None and known.source != "pack":
                known = replace(known, usual_templates=max(1.0, stored.templates / stored.scores.subjects))
            if stored.fusion == fusion:  # else it is replaced soon, at this sequence
                with self._lock:
                    self._known[_key(gallery)] = (stored.sequence, fusion, known)
                    self._known.move_to_end(_key(gallery))
                    if len(self._known) > KNOWN_AT_ONCE:
                        self._known.popitem(last=False)
        return known

    def at_hand(self, gallery: Gallery) -> bool:
        """Whether :meth:`of` can answer without reading."""
        if gallery.evidence_sequence is None:
            return True
        with self._lock:
            *derived, _ = self._known.get(_key(gallery), (-1, gallery.settings.fusion, None))
        return derived == [gallery.evidence_sequence, gallery.settings.fusion]

    def known(self, gallery: Gallery, risk: GalleryRisk | None) -> KnownRisk | None:
        """What decisions rest on, given what :meth:`gallery_risk` says."""
        of_pack = self.of_pack(gallery.fingerprint)
        if risk is not None:
            return KnownRisk(risk.curve, "gallery" if of_pack is None else "both")
        if of_pack is None or gallery.settings.fusion != "max":
            return of_pack
        # The pack compared photo with photo: of a subject's templates each is another chance for a stranger.
        return replace(of_pack, per_subject=max(1.0, gallery.templates / max(1, gallery.subjects)))

    def gallery_risk(self, gallery: Gallery, stored: StoredEvidence | None) -> GalleryRisk | None:
        """None: the evidence is too little, or of another rule of fusion than the gallery's now."""
        calibration = self.calibration(gallery)
        fewest = FEWEST_ALONE if calibration is None else FEWEST_SUBJECTS
        if stored is None or stored.scores.subjects < fewest or stored.fusion != gallery.settings.fusion:
            return None
        return GalleryRisk(stored.scores, calibration)

    def follow(self, gallery: Gallery) -> None:
        """Derive the evidence anew in the background if the gallery has changed enough; returns at once. A gallery of
        another recogniser waits until that one is served."""
        with self._lock:
            named = gallery.name, gallery.generation
            if named in self._waiting or gallery.fingerprint not in self._calibrations:
                return
            self._waiting.add(named)
        try:
            self._thread.submit(self._follow, *named)
        except RuntimeError:  # closing: the next start sees to it
            log.debug("not followed: %s", gallery.name)

    def forget(self, gallery: Gallery) -> None:
        with self._lock:
            for key in [key for key in self._known if key[0] == gallery.pk]:
                del self._known[key]

    def refresh(self, name: str, always: bool = False, generation: int | None = None) -> StoredEvidence:
        """Derive a gallery's evidence if it is stale, or ``always``; return what is stored then. ``generation``: of
        which of its vectors; default: those that answer requests.

        Raises:
            GalleryNotFoundError: there is no such gallery.
            GalleryMovedError: it has no vectors of this generation, or moved to another recogniser meanwhile.
            StorageError: it cannot be read or written.
        """
        with self._deriving:
            gallery = self._store.gallery(name)
            if generation is not None:
                gallery = gallery.under(generation)
            stored = self._store.evidence(gallery)
            if stored is not None and not always and not self.is_stale(gallery, stored):
                return stored
            snapshot = self._store.snapshot(gallery)
            scores = impostor_evidence(snapshot, gallery.settings.fusion)
            templates = len(snapshot.template_pks)
            new = StoredEvidence(snapshot.sequence, gallery.settings.fusion, templates, scores, datetime.now(UTC))
            # Both for the risk that the gallery asks for now: what moved the threshold is the evidence alone.
            before, after = self._described(gallery, stored), self._described(gallery, new)
            event = THRESHOLD_MOVED if before != after and gallery.settings.risk.kind != "threshold" else None
            target = gallery.settings.risk
            details: dict[str, Any] = {"risk": {target.kind: target.value}, "before": before, "after": after}
            if gallery.generation != gallery.current_generation:
                details["recogniser"] = gallery.fingerprint  # of a generation that answers nobody yet, or no more
            self._store.put_evidence(gallery, new, event, details)
            return new

    def is_stale(self, gallery: Gallery, stored: StoredEvidence) -> bool:
        # Of a shortened log nobody can count what came and went.
        if stored.fusion != gallery.settings.fusion or stored.sequence < gallery.log_floor:
            return True
        return self._store.changes_since(gallery, stored.sequence) > STALE_SHARE * stored.templates

    def _follow(self, name: str, generation: int) -> None:
        with self._lock:
            self._waiting.discard((name, generation))
        try:
            self.refresh(name, generation=generation)
        except (GalleryNotFoundError, GalleryMovedError):
            pass  # meanwhile: whoever searches it next sees to it
        except Exception:  # nobody waits for this thread's answer: whatever it is, the log has it
            log.exception("the risk of gallery %s could not be derived; the last one stays", name)

    def _described(self, gallery: Gallery, stored: StoredEvidence | None) -> dict[str, Any] | None:
        """The threshold of the gallery's own risk, and what it rests on, for the audit."""
        if stored is None:
            return None
        then = replace(gallery, settings=replace(gallery.settings, fusion=stored.fusion))
        risk = self.gallery_risk(then, stored)
        known = self.known(then, risk)
        if known is None:
            return None
        thresholds = thresholds_for(gallery.settings.risk, known, stored.scores.subjects)
        return {
            "threshold": round(thresholds.accept, 4),
            "source": thresholds.source,
            "extrapolated": thresholds.extrapolated,
            "fusion": stored.fusion,
            "subjects": stored.scores.subjects,
            "templates": stored.templates,
            "pairs": stored.scores.pairs,
            "gallery_share": round(risk.gallery_share, 4) if risk else 0.0,
            "duplicate_pairs": round(risk.duplicate_pairs, 1) if risk else 0.0,
        }


def _key(gallery: Gallery) -> tuple[int, int]:
    return gallery.pk, gallery.generation
