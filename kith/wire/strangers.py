"""Strangers: unknown people that a gallery remembers."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kith.wire.erasures import ReceiptOut
from kith.wire.fields import ObjectId, PersonName, RequestModel, SubjectId, Timestamp


class SightingOut(BaseModel):
    """Stranger that a face matched, with this sighting."""

    id: str
    first_seen: Timestamp
    last_seen: Timestamp = Field(description="To within a minute.")
    seen_count: int = Field(description="Number of visits: sightings up to ten minutes apart are one visit.")


class StrangerOut(SightingOut):
    template_count: int


class PromoteIn(RequestModel):
    subject: SubjectId = Field(description="The subject that receives the templates. It is created if missing.")
    name: PersonName | None = Field(None, description="Name of a subject that has none.")


class StrangerMergeIn(RequestModel):
    into: ObjectId = Field(description="The stranger that remains.")


class StrangerMergedOut(BaseModel):
    """Result of a merge: the remaining stranger, and the receipt of the other one."""

    stranger: StrangerOut
    receipt: ReceiptOut
