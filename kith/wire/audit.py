"""Lines of the audit log."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from kith.wire.fields import Page, Timestamp


class AuditLineOut(BaseModel):
    """One action, completed or refused."""

    number: int = Field(description="Position in the hash chain.")
    at: Timestamp
    event: str
    outcome: str
    actor: str = Field(description="'key:ID', 'operator', 'anonymous', or 'service' for background work.")
    request_id: str | None = Field(description="X-Request-Id of the response.")
    gallery: str | None
    subject: str | None = Field(
        description="Keyed hash of the subject id. Filter by 'subject' to list the lines of one person."
    )
    details: dict[str, Any]
    hash: str


class AuditOut(Page[AuditLineOut]):
    """Page of audit lines."""
