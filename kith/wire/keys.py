"""API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, StringConstraints, model_validator

from kith.wire.common import KeyState, Scope
from kith.wire.fields import NORMALIZED, SINGLE_LINE, GalleryName, RequestModel, Timestamp, to_utc

DAY_S: Final = 86_400
KEY_ID: Final = "^[0-9a-f]{12}$"
KeyId = Annotated[str, Field(pattern=KEY_ID, examples=["0f3b2a9c41de"])]


class KeyIn(RequestModel):
    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=SINGLE_LINE), NORMALIZED] = Field(
        description="Label of the key, such as its owner."
    )
    scopes: list[Scope] = Field(min_length=1, max_length=5)
    galleries: list[GalleryName] | None = Field(
        None, min_length=1, max_length=100, description="Names of galleries, existing or future; null: all."
    )
    expires_at: Annotated[AwareDatetime, AfterValidator(to_utc)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            raise ValueError("expires_at is past")
        return self


class RotateIn(RequestModel):
    overlap_s: int = Field(DAY_S, ge=0, le=90 * DAY_S, description="Time for which the old key remains valid.")


class KeyOut(BaseModel):
    id: str
    name: str
    scopes: list[Scope]
    galleries: list[str] | None = Field(description="Null: all galleries.")
    state: KeyState = Field(
        description="altered: the row was changed outside of the service; a key in this state is rejected."
    )
    created_at: Timestamp
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    used_at: Timestamp | None = Field(description="Last use, with a resolution of some minutes.")


class CreatedKeyOut(KeyOut):
    token: str = Field(description="Shown only once, in this response.")
