"""Export of all data about one subject or stranger: stored rows, receipts and audit lines.

Foreign keys lead from the subject to its rows, and the declaration of sealed columns opens them: a new table is
exported without code of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kith.wire.fields import rfc3339
from service.core.errors import SubjectNotFoundError
from service.domain.gallery import Gallery
from service.security.sealing import Seal
from service.storage.audit.log import Entry, record_entries
from service.storage.db.engine import Database
from service.storage.db.row_sealing import ANSWER, CROP, SEALED, VECTOR, open_crop, subject_lookup
from service.storage.db.tables import albums, audit, generations, job_items, jobs, metadata, subjects
from service.storage.repositories.erasures import is_named, receipts
from service.storage.repositories.strangers import read_stranger

FORMAT: Final = 2
ELSEWHERE: Final = (
    "Servers hold names and embeddings of galleries in use in memory; Milvus, if used, one vector of the subject. "
    "Backups hold this data as of their creation. Archives of unfinished jobs are stored encrypted in the spool; the "
    "subjects in them are unknown until the job reads them."
)
LINE: Final = ("number", "at", "event", "outcome", "actor", "request_id", "details", "hash")
RECOGNIZER: Final = ("generation", "fingerprint", "model", "dimension")
OWNERS: Final[Mapping[sa.Table, tuple[str, ...]]] = {
    albums: ("id", "generation", "created_at", "expires_at"),
    jobs: ("id", "kind"),
}
"""What the export says of the album or job that a row belongs to, beside its subject."""


def everything_about(database: Database, gallery: Gallery, subject_id: str) -> dict[str, Any]:
    """Return a JSON document of one snapshot, and write an audit line of the export. Blocks.

    Reading takes no lock, however many audit lines are searched. Of an erased subject, receipts and audit lines remain.
    Raises SubjectNotFoundError: nothing exists. StorageError.
    """
    with database.read() as connection:
        document = _document(connection, gallery, subject_lookup(gallery.seal, subject_id))
    if not any(document[name] for name in ("subject", "job_items", "receipts", "audit")):
        raise SubjectNotFoundError(f"gallery {gallery.name!r} has no subject {subject_id!r}")
    record_entries(database, [Entry.about(gallery, "subject_exported", subject_id)])
    return {"kind": "kith-subject", "id": subject_id, **document}


def everything_about_stranger(database: Database, gallery: Gallery, stranger_id: str) -> dict[str, Any]:
    """As :func:`everything_about`, of a stranger. Raises stranger_not_found, StorageError."""
    with database.read() as connection:
        read_stranger(connection, gallery, stranger_id)
        document = _document(connection, gallery, stranger_id)
    record_entries(database, [Entry.about(gallery, "stranger_exported", stranger=stranger_id)])
    return {"kind": "kith-stranger", "id": stranger_id, **document}


def _document(connection: Connection, gallery: Gallery, lookup: str) -> dict[str, Any]:
    """Return what is stored of a subject or stranger, given its keyed hash."""
    made_by = sa.select(*generations.c[RECOGNIZER]).where(generations.c.gallery_pk == gallery.pk)
    recognizers = connection.execute(made_by.order_by(generations.c.generation)).all()
    rows = _Rows(connection, gallery.seal, {one.generation: one.dimension for one in recognizers})
    items = job_items.c.job_pk.in_(sa.select(jobs.c.pk).where(jobs.c.gallery_pk == gallery.pk))
    named = (audit.c.subject == lookup) | sa.cast(audit.c.details, sa.Text).contains(lookup)
    lines = sa.select(*audit.c[LINE]).where(audit.c.gallery_pk == gallery.pk, named).order_by(audit.c.number)
    return {
        "format": FORMAT,
        "at": rfc3339(datetime.now(UTC)),
        "gallery": gallery.name,
        "pseudonym": lookup,
        "recognizers": [_plain(one) for one in recognizers],
        "subject": next(iter(rows.read(subjects, is_named(gallery.pk, subjects.c.lookup == lookup))), None),
        "job_items": rows.read(job_items, items & (job_items.c.subject == lookup)),
        "receipts": [each.model_dump(mode="json") for each in receipts(connection, gallery, lookup)],
        "audit": [_plain(line) for line in connection.execute(lines)],
        "elsewhere": ELSEWHERE,
    }


@dataclass(frozen=True)
class _Rows:
    """Reader of rows and of everything that hangs on them. ``dimensions``: of vectors, by generation."""

    connection: Connection
    seal: Seal
    dimensions: Mapping[int, int]

    def read(self, table: sa.Table, chosen: sa.ColumnElement[bool], sealed: bool = True) -> list[dict[str, Any]]:
        """Return the chosen rows without keys, each with the rows that refer to it by the name of their table.

        ``sealed``: with sealed columns. Those of decoys are left out: they are of other people.
        """
        query = sa.select(table).where(chosen).order_by(*table.primary_key)
        return [self._document(table, row, sealed) for row in self.connection.execute(query).all()]

    def _document(self, table: sa.Table, row: sa.Row[Any], sealed: bool) -> dict[str, Any]:
        document = {name: value for name, value in _plain(row).items() if table.c[name] not in SEALED}
        for key in table.foreign_keys:
            if names := OWNERS.get(owner := key.column.table):
                one = sa.select(*owner.c[names]).where(key.column == row._mapping[key.parent.name])
                document[owner.name] = _plain(self.connection.execute(one).one())
        for name, value in row._mapping.items():
            if sealed and table.c[name] in SEALED and value is not None:
                opened = self._open(SEALED[table.c[name]][0], value, document)
                document |= opened if isinstance(opened, dict) and name == "sealed" else {name: opened}
        for child in metadata.sorted_tables:
            for key in child.foreign_keys:
                if key.column.table is table:
                    own, name = key.parent == row._mapping[key.column.name], child.name
                    is_decoy = child is subjects
                    document["decoys" if is_decoy else name] = self.read(child, own, sealed and not is_decoy)
        return document

    def _open(self, purpose: str, value: bytes, document: Mapping[str, Any]) -> Any:
        if purpose == VECTOR:
            made_by = document.get("albums", document)
            number = made_by["generation"]
            return self.seal.open_vectors([value], number, self.dimensions[number])[0].tolist()
        if purpose == CROP:
            crop = open_crop(self.seal, value)
            return {"image": base64.b64encode(crop.image).decode(), "landmarks": crop.landmarks_xy}
        if purpose == ANSWER:
            return {"response": self.seal.open(value, purpose).decode()}
        return self.seal.open_json(value, purpose)


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    """Return the columns of a row as JSON values, without keys of rows."""
    values = {name: value for name, value in row._mapping.items() if not name.endswith("pk")}
    return {name: rfc3339(value) if isinstance(value, datetime) else value for name, value in values.items()}
