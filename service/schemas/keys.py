"""API keys: requests, and conversion to responses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints, model_validator

from kith.wire.common import Scope
from kith.wire.keys import CreatedKeyOut, KeyOut
from service.schemas.fields import NORMALIZED, SINGLE_LINE, GalleryName, RequestModel, to_utc
from service.security.api_keys import ApiKey, Rights

DAY_S: Final = 86_400


class KeyIn(RequestModel):
    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=SINGLE_LINE), NORMALIZED] = Field(
        description="Label of the key, such as its owner."
    )
    scopes: list[Scope] = Field(min_length=1, max_length=5)
    galleries: list[GalleryName] | None = Field(
        None, min_length=1, max_length=100, description="Names of galleries, existing or future; null: all."
    )
    expires_at: Annotated[AwareDatetime, AfterValidator(to_utc)] | None = None
    rate: float | None = Field(None, ge=1e-6, le=1_000_000, description="Requests per second; null: KITH_RATE_LIMIT.")
    burst: int | None = Field(
        None, ge=1, le=1_000_000, description="Maximum requests at once; null: the requests of one second."
    )

    @property
    def rights(self) -> Rights:
        return Rights(frozenset(self.scopes), None if self.galleries is None else frozenset(self.galleries))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.burst is not None and self.rate is None:
            raise ValueError("burst needs a rate")
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            raise ValueError("expires_at is past")
        return self


class RotateIn(RequestModel):
    overlap_s: int = Field(DAY_S, ge=0, le=90 * DAY_S, description="Time for which the old key remains valid.")


def to_key_out(key: ApiKey) -> KeyOut:
    """Convert a key, without its token."""
    return KeyOut.model_validate(_fields(key))


def to_created_key_out(key: ApiKey, token: str) -> CreatedKeyOut:
    """Convert a key with its token."""
    return CreatedKeyOut.model_validate({**_fields(key), "token": token})


def _fields(key: ApiKey) -> dict[str, Any]:
    rights = key.rights
    return {
        **vars(key),
        "scopes": sorted(rights.scopes),
        "galleries": None if rights.galleries is None else sorted(rights.galleries),
        "state": key.state(datetime.now(UTC)),
    }
