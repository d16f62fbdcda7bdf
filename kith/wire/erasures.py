"""Receipts of erasures."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.common import ErasedKind, Page
from kith.wire.fields import Timestamp


class ReceiptOut(BaseModel):
    id: str
    kind: ErasedKind
    gallery: str
    subject: str | None = Field(
        None,
        description="Keyed hash of the subject id, which only the gallery's key can compute; or the id of a stranger "
        "or album.",
    )
    template: str | None = Field(None, description="Id of the erased template or decoy.")
    removed: dict[str, int] = Field(description="Removed rows by kind.")
    at: Timestamp
    line: int = Field(description="Number of the line in the gallery's audit log; line and hash are the proof.")
    hash: str
    log_emptied: bool | None = Field(
        None,
        description="SQLite's write-ahead log was truncated at once. False: it is truncated within a minute after the "
        "last older read transaction ends.",
    )


class ReceiptsOut(Page[ReceiptOut]):
    """Page of erasure receipts."""


class VerdictOut(BaseModel):
    receipt: ReceiptOut
    holds: bool
    line_found: bool = Field(description="The audit log has the line that the receipt names.")
    gone: bool = Field(description="The erased item does not exist.")
    enrolled_since: bool = Field(description="The item exists and was enrolled after the erasure.")


class DeletedOut(BaseModel):
    deleted: bool = True
    subject_count: int = 0
    template_count: int = 0
    stranger_count: int = 0
    receipt: ReceiptOut
