"""Risk evidence of galleries."""

from __future__ import annotations

import json
from typing import Any, Final

import sqlalchemy as sa

from models.risk.impostor_evidence import ImpostorEvidence
from service.domain.events import Event
from service.domain.gallery import Gallery, StoredEvidence
from service.storage.audit.log import note
from service.storage.db.engine import Database
from service.storage.db.tables import evidence

THRESHOLD_MOVED: Final = "threshold_moved"


class EvidenceStore:
    """Evidence in SQL: the score distribution between different subjects, one row per generation of a gallery.

    It is derived once for all processes. Every method is one transaction and blocks.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, gallery: Gallery) -> StoredEvidence | None:
        """Return the stored evidence, which may lag behind the change log."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(evidence).where(_evidence_of(gallery))).first()
        if row is None:
            return None
        scores = ImpostorEvidence.from_document(json.loads(row.document))
        return StoredEvidence(row.sequence, row.templates, scores, row.derived_at)

    def put(self, gallery: Gallery, new: StoredEvidence, moved: dict[str, Any] | None = None) -> None:
        """Replace a gallery's evidence, unless later one is stored. ``moved``: how that moved the threshold."""
        values = {name: getattr(new, name) for name in ("sequence", "templates", "derived_at")}
        values["document"] = json.dumps(new.evidence.document())
        with self._database.change(gallery) as connection:
            stored = connection.execute(sa.select(evidence).where(_evidence_of(gallery))).first()
            if stored is not None and stored.sequence > new.sequence:
                return
            connection.execute(evidence.delete().where(_evidence_of(gallery)))
            key = {"gallery_pk": gallery.pk, "generation": gallery.generation}
            connection.execute(evidence.insert().values(**key, **values))
            if moved is not None:
                event = Event(THRESHOLD_MOVED, moved)
                note(self._database.vault, connection, THRESHOLD_MOVED, gallery, published=[event], **moved)


def _evidence_of(gallery: Gallery) -> sa.ColumnElement[bool]:
    return (evidence.c.gallery_pk == gallery.pk) & (evidence.c.generation == gallery.generation)
