"""API keys."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field

from kith.wire.common import KeyState, Page, Scope


class KeyOut(BaseModel):
    id: str
    name: str
    scopes: list[Scope]
    galleries: list[str] | None = Field(description="Null: all galleries.")
    rate: float | None
    burst: int | None
    state: KeyState = Field(
        description="altered: the row was changed outside of the service; a key in this state is rejected."
    )
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    used_at: datetime | None = Field(description="Last use, with a resolution of some minutes.")


class CreatedKeyOut(KeyOut):
    token: str = Field(description="Shown only once, in this response.")


class KeysOut(Page[KeyOut]):
    """Page of API keys."""
