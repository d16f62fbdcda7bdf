"""API keys, as they are asked for and told of."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, model_validator

from service.api.schemas import IN_ONE_LINE, GalleryName, Request, in_utc
from service.security.keys import ApiKey, KeyState, Rights, Scope

DAY_S: Final = 86_400


class KeyIn(Request):
    name: str = Field(min_length=1, max_length=128, pattern=IN_ONE_LINE, description="Whose it is, for people.")
    scopes: list[Scope] = Field(min_length=1, max_length=4)
    galleries: list[GalleryName] | None = Field(
        None, min_length=1, max_length=100, description="Names, also of galleries to come; null: all."
    )
    expires_at: Annotated[AwareDatetime, AfterValidator(in_utc)] | None = None
    rate: float | None = Field(None, ge=1e-6, le=1_000_000, description="Requests a second; null: KITH_RATE_LIMIT.")
    burst: int | None = Field(None, ge=1, le=1_000_000, description="At once; null: as many as in a second.")

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


class RotateIn(Request):
    overlap_s: int = Field(DAY_S, ge=0, le=90 * DAY_S, description="For how long the old key still works.")


class KeyOut(BaseModel):
    id: str
    name: str
    scopes: list[Scope]
    galleries: list[str] | None = Field(description="Null: all.")
    rate: float | None
    burst: int | None
    state: KeyState = Field(
        description="'altered': in the database, by somebody else than the service; it may nothing."
    )
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    used_at: datetime | None = Field(description="To some minutes.")

    @classmethod
    def of(cls, key: ApiKey) -> KeyOut:
        return cls.model_validate(_fields(key))


class NewKeyOut(KeyOut):
    token: str = Field(description="Told here and never again.")

    @classmethod
    def of_new(cls, key: ApiKey, token: str) -> NewKeyOut:
        return cls.model_validate({**_fields(key), "token": token})


class KeysOut(BaseModel):
    keys: list[KeyOut]
    next: str | None = Field(None, description="Send as 'cursor' for the next page; null on the last.")


def _fields(key: ApiKey) -> dict[str, Any]:
    rights = key.rights
    return {
        **vars(key),
        "scopes": sorted(rights.scopes),
        "galleries": None if rights.galleries is None else sorted(rights.galleries),
        "state": key.state(datetime.now(UTC)),
    }
