"""Gallery rows: reads and changes of them, and their translation into :class:`Gallery`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from models.vision.quality import QualityGate
from service.domain.gallery import Gallery, GallerySettings, Generation
from service.domain.outcomes import RiskTarget
from service.storage.db.key_vault import Vault
from service.storage.db.tables import (
    IS_PERSON,
    data_keys,
    erasures,
    evidence,
    galleries,
    generations,
    last_change,
    receivers,
    subjects,
    templates,
    vectors,
)

PLAIN_COLUMNS: Final = frozenset(part.name for part in fields(Gallery)) - {
    "settings",
    "moved",
    "outsiders",
}
"""Columns that are attributes of :class:`Gallery`, among other names."""
GENERATION_COLUMNS: Final = ("fingerprint", "dimension", "model", "state")
VISIBLE: Final = galleries.c.companion_of.is_(None)
"""Condition of the galleries that users know, without those of strangers."""
KEY_OWNER: Final = sa.func.coalesce(galleries.c.companion_of, galleries.c.pk)
"""Gallery whose data key seals the rows of a gallery."""


def gallery_rows() -> sa.Select[Any]:
    """Select galleries with their data key, second generation and evidence sequences."""
    other = (generations.c.gallery_pk == galleries.c.pk) & generations.c.state.not_in(["current", "dropped"])
    return sa.select(
        galleries,
        _evidence_sequence(galleries.c.current_generation).label("evidence_sequence"),
        generations.c.generation.label("other_number"),
        *(generations.c[name].label(f"other_{name}") for name in GENERATION_COLUMNS),
        _evidence_sequence(generations.c.generation).label("other_evidence_sequence"),
        _moved().label("moved"),
        _outsiders().label("outsiders"),
        last_change().label("last_change"),
        _last_receipt().label("erased"),
        webhooks_state().label("webhooks"),
        data_keys.c.wrapped,
        data_keys.c.master_key,
    ).select_from(galleries.outerjoin(data_keys, data_keys.c.gallery_pk == KEY_OWNER).outerjoin(generations, other))


def gallery_of(row: sa.Row[Any], vault: Vault) -> Gallery:
    """Return the gallery of a :func:`gallery_rows` row. Its key is unwrapped at first use (MasterKeyError)."""
    stored = dict(row.settings)
    risk, quality_gate = RiskTarget(**stored.pop("risk")), QualityGate(**stored.pop("quality_gate"))
    other = {name: row._mapping[f"other_{name}"] for name in ("number", *GENERATION_COLUMNS, "evidence_sequence")}
    return Gallery(
        **{name: value for name, value in row._mapping.items() if name in PLAIN_COLUMNS},
        settings=GallerySettings(risk=risk, quality_gate=quality_gate, **stored),
        seal=vault.seal(row.companion_of or row.pk, row.wrapped, row.master_key),
        subjects=row.subject_count,
        templates=row.template_count,
        generation=row.current_generation,
        other=None if row.other_number is None else Generation(**other),
        moved=bool(row.moved),
        outsiders=dict(_pairs(row.outsiders or "")),
    )


def read_companion(connection: Connection, gallery: Gallery) -> Gallery | None:
    """Return the hidden gallery of a gallery's strangers, with its recognizer and key; None before the first one."""
    row = connection.execute(COMPANION, {"gallery": gallery.pk}).first()
    if row is None:
        return None
    return replace(gallery, settings=GallerySettings(), other=None, companion_of=gallery.pk, **row._mapping)


def strangers_of(gallery_pk: int) -> sa.ColumnElement[bool]:
    """Select the subjects that are strangers of a gallery, of any recognizer."""
    return subjects.c.gallery_pk.in_(sa.select(galleries.c.pk).where(galleries.c.companion_of == gallery_pk))


def is_embedded(generation: int) -> sa.ColumnElement[bool]:
    """Select the subjects with a vector of a generation."""
    own = (templates.c.subject_pk == subjects.c.pk) & (vectors.c.template_pk == templates.c.pk)
    return sa.exists().where(own, vectors.c.generation == generation).correlate(subjects)


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    numbers = iter(map(int, text.split()))
    return zip(numbers, numbers, strict=True)


def gallery_value(connection: Connection, gallery_pk: int, column: sa.ColumnElement[Any]) -> Any:
    """Return the value of a column of ``galleries``; None if the gallery was deleted."""
    return connection.execute(sa.select(column).where(galleries.c.pk == gallery_pk)).scalar()


def update_gallery(connection: Connection, gallery_pk: int, **values: Any) -> None:
    connection.execute(galleries.update().where(galleries.c.pk == gallery_pk).values(**values))


def _moved() -> sa.ColumnElement[bool]:
    every = generations.alias()  # including dropped generations, whose rows stay
    return sa.exists().where(every.c.gallery_pk == galleries.c.pk, every.c.generation > 0).correlate(galleries)


def _outsiders() -> sa.ScalarSelect[str]:
    """Select a text with the keys of :attr:`Gallery.outsiders`; NULL if there are none."""
    pair = sa.cast(subjects.c.pk, sa.Text) + " " + sa.cast(subjects.c.owner_pk, sa.Text)
    owned = subjects.join(templates, templates.c.subject_pk == subjects.c.pk)
    current = (vectors.c.template_pk == templates.c.pk) & (vectors.c.generation == galleries.c.current_generation)
    here = sa.select(sa.func.aggregate_strings(pair, " ")).select_from(owned.join(vectors, current))
    return here.where(subjects.c.gallery_pk == galleries.c.pk, ~IS_PERSON).correlate(galleries).scalar_subquery()


def _last_receipt() -> sa.ScalarSelect[int]:
    last = sa.select(sa.func.coalesce(sa.func.max(erasures.c.pk), 0)).where(erasures.c.gallery_pk == galleries.c.pk)
    return last.correlate(galleries).scalar_subquery()


def webhooks_state() -> sa.ScalarSelect[int]:
    """Select a number that differs after each creation or deletion of a webhook; 0: there are none.

    Count and highest key are enough: only a creation raises the count again, and it brings a key never used before.
    """
    count = sa.cast(sa.func.count(), sa.BigInteger) * sa.literal(2**32, sa.BigInteger)
    return sa.select(count + sa.func.coalesce(sa.func.max(receivers.c.pk), 0)).select_from(receivers).scalar_subquery()


def _evidence_sequence(generation: sa.ColumnElement[int]) -> sa.ScalarSelect[int]:
    return (
        sa.select(evidence.c.sequence)
        .where(evidence.c.gallery_pk == galleries.c.pk, evidence.c.generation == generation)
        .scalar_subquery()
    )


# Built once: SQLAlchemy takes longer to build a statement than SQLite to run it.
COMPANION: Final = sa.select(
    galleries.c.pk,
    galleries.c.name,
    galleries.c.subject_count.label("subjects"),
    galleries.c.template_count.label("templates"),
    galleries.c.log_floor,
    last_change().label("last_change"),
).where(galleries.c.companion_of == sa.bindparam("gallery"))
