"""Gallery rows: the query that reads them, and their translation into :class:`Gallery`."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from models.vision.quality_gate import QualityGate
from service.domain.gallery import Gallery, GallerySettings, Generation
from service.domain.outcomes import RiskTarget
from service.storage.db.key_vault import Vault
from service.storage.db.tables import data_keys, evidence, galleries, generations, last_change, webhooks

FORMER_SETTINGS: Final = frozenset({"min_margin"})
OTHER_COLUMNS: Final = ("generation", "fingerprint", "dimension", "model", "state", "details")
"""Columns of the second generation, labeled ``other_...``."""


def gallery_rows() -> sa.Select[Any]:
    """Select galleries with their data key, second generation and evidence sequences."""
    other = (generations.c.gallery_pk == galleries.c.pk) & generations.c.state.not_in(["current", "dropped"])
    return sa.select(
        galleries,
        _evidence_sequence(galleries.c.current_generation).label("evidence_sequence"),
        *(generations.c[name].label(f"other_{name}") for name in OTHER_COLUMNS),
        _evidence_sequence(generations.c.generation).label("other_evidence_sequence"),
        _moved().label("moved"),
        last_change().label("last_change"),
        webhooks_state().label("webhooks"),
        data_keys.c.wrapped,
        data_keys.c.master_key,
    ).select_from(
        galleries.outerjoin(data_keys, data_keys.c.gallery_pk == galleries.c.pk).outerjoin(generations, other)
    )


def gallery_of(row: sa.Row[Any], vault: Vault) -> Gallery:
    """Return the gallery of a :func:`gallery_rows` row. Its key is unwrapped at first use (MasterKeyError)."""
    stored = {name: value for name, value in row.settings.items() if name not in FORMER_SETTINGS}
    risk, quality_gate = RiskTarget(**stored.pop("risk")), QualityGate(**stored.pop("quality_gate"))
    return Gallery(
        pk=row.pk,
        name=row.name,
        fingerprint=row.fingerprint,
        dimension=row.dimension,
        settings=GallerySettings(risk=risk, quality_gate=quality_gate, **stored),
        created_at=row.created_at,
        seal=vault.seal(row.pk, row.wrapped, row.master_key),
        subjects=row.subject_count,
        templates=row.template_count,
        evidence_sequence=row.evidence_sequence,
        generation=row.current_generation,
        current_generation=row.current_generation,
        log_floor=row.log_floor,
        last_change=row.last_change,
        other=_other_generation(row),
        moved=bool(row.moved),
        version=row.version,
        erased=row.erased,
        webhooks=row.webhooks,
    )


def _moved() -> sa.ColumnElement[bool]:
    every = generations.alias()  # including dropped generations, whose rows stay
    return sa.exists().where(every.c.gallery_pk == galleries.c.pk, every.c.generation > 0).correlate(galleries)


def webhooks_state() -> sa.ScalarSelect[int]:
    """Select a number that differs after each creation or deletion of a webhook; 0: there are none.

    Count and highest key are enough: only a creation raises the count again, and it brings a key never used before.
    """
    count = sa.cast(sa.func.count(), sa.BigInteger) * sa.literal(2**32, sa.BigInteger)
    return sa.select(count + sa.func.coalesce(sa.func.max(webhooks.c.pk), 0)).select_from(webhooks).scalar_subquery()


def _evidence_sequence(generation: sa.ColumnElement[int]) -> sa.ScalarSelect[int]:
    return (
        sa.select(evidence.c.sequence)
        .where(evidence.c.gallery_pk == galleries.c.pk, evidence.c.generation == generation)
        .scalar_subquery()
    )


def _other_generation(row: sa.Row[Any]) -> Generation | None:
    if row.other_generation is None:
        return None
    return Generation(
        number=row.other_generation,
        fingerprint=row.other_fingerprint,
        dimension=row.other_dimension,
        model=row.other_model,
        state=row.other_state,
        details=row.other_details,
        evidence_sequence=row.other_evidence_sequence,
    )
