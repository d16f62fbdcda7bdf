"""Conversion of erasure receipts to responses."""

from __future__ import annotations

from kith.wire.erasures import DeletedOut, ReceiptOut, VerdictOut
from service.storage.repositories.erasures import Receipt, ReceiptVerification


def to_receipt_out(receipt: Receipt) -> ReceiptOut:
    """Convert a receipt."""
    return ReceiptOut(**receipt.document())


def to_verdict_out(verdict: ReceiptVerification) -> VerdictOut:
    """Convert the result of a receipt's verification."""
    found = {name: getattr(verdict, name) for name in ("holds", "line_found", "gone", "enrolled_since")}
    return VerdictOut(receipt=to_receipt_out(verdict.receipt), **found)


def to_deleted_out(receipt: Receipt) -> DeletedOut:
    """Convert the receipt of a deletion."""
    counts = {kind: receipt.removed.get(kind, 0) for kind in ("subjects", "templates")}
    return DeletedOut(**counts, receipt=to_receipt_out(receipt))
