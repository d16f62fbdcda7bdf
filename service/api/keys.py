"""API keys: make, list, rotate, revoke. A key's token is told once, when it is made."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.api.context import Kith
from service.api.galleries import Limit, PlaceCursor, place_in
from service.api.key_schemas import KeyIn, KeyOut, KeysOut, NewKeyOut, RotateIn
from service.api.openapi import PROBLEMS
from service.api.permissions import ANONYMOUS, Asking, Permitted
from service.errors import InvalidRequestError
from service.gallery.sealed_rows import close_place

router = APIRouter(route_class=Permitted, prefix="/v1/keys", tags=["keys"], responses=PROBLEMS)
KeyPath = Annotated[str, Path(pattern="^[0-9a-f]{12}$")]


@router.post("", status_code=201)
async def create_key(body: KeyIn, kith: Kith, caller: Asking) -> NewKeyOut:
    """Make a key. Its token is in this answer alone. The first one, where the service asks for none yet, is to have the
    scope `admin` for all galleries: it closes the service, and nobody else could make another."""
    if caller is ANONYMOUS and not body.rights.may_everything:
        raise InvalidRequestError(
            "the first key closes the service: one of fewer rights would leave nobody who can make another",
            remedy="Make the first key with the scope 'admin' and for all galleries, and the others with it "
            "(docs/keys.md).",
        )
    made = await kith.run(kith.keys.create, body.name, body.rights, body.expires_at, body.rate, body.burst)
    return NewKeyOut.of_new(*made)


@router.get("")
async def list_keys(
    kith: Kith,
    ended: Annotated[bool, Query(description="Also those that were revoked or have expired.")] = False,
    cursor: PlaceCursor = None,
    limit: Limit = 100,
) -> KeysOut:
    """The oldest first."""
    seal = (await kith.run(kith.keys.ring)).seal
    found = await kith.run(kith.keys.list_keys, ended, place_in(seal, cursor), limit + 1)
    page = found[:limit]
    more = close_place(seal, page[-1][0]) if len(found) > limit else None
    return KeysOut(keys=[KeyOut.of(key) for _, key in page], next=more)


@router.get("/{key}")
async def get_key(key: KeyPath, kith: Kith) -> KeyOut:
    return KeyOut.of(await kith.run(kith.keys.key, key))


@router.delete("/{key}")
async def revoke_key(key: KeyPath, kith: Kith) -> KeyOut:
    """For good: the next request with it is refused, whichever process it comes to."""
    return KeyOut.of(await kith.run(kith.keys.revoke, key))


@router.post("/{key}/rotate", status_code=201)
async def rotate_key(key: KeyPath, body: RotateIn, kith: Kith) -> NewKeyOut:
    """Make a key with the same rights in the place of this one, which works on beside it for `overlap_s`."""
    return NewKeyOut.of_new(*await kith.run(kith.keys.rotate, key, timedelta(seconds=body.overlap_s)))
