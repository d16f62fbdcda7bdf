"""Receipts of erasures."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import ErasedKind
from kith.wire.fields import Timestamp


class ReceiptOut(BaseModel):
    id: str
    kind: ErasedKind
    gallery: str
    subject: str | None = Field(
        None,
        description="Keyed hash of the subject id, which only the gallery's key can compute; or the id of a stranger, "
        "decoy or album. Null of the kind subject: all strangers.",
    )
    template: str | None = Field(None, description="Id of the erased template.")
    removed: dict[str, int] = Field(
        description="How many subjects and templates went, strangers included; of the kind moved, what moved."
    )
    at: Timestamp
    moved_to: str | None = Field(
        None, description="Of a merged or promoted one (kind moved): keyed hash or id of who has the data since."
    )
    log_emptied: bool | None = Field(
        None,
        description="SQLite's write-ahead log was truncated at once. False: it is truncated within a minute after the "
        "last older read transaction ends.",
    )


class DeletedOut(BaseModel):
    deleted: bool = True
    subject_count: int = 0
    template_count: int = 0
    receipt: ReceiptOut
