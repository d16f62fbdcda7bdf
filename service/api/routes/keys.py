"""API keys: create, list, rotate, revoke. A key's token is shown once, when it is created."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Annotated

from fastapi import Query

from kith.wire.fields import Page
from kith.wire.keys import CreatedKeyOut, KeyId, KeyIn, KeyOut, RotateIn
from service.api.http.access import ADMIN_ALL, BackendDep, CallerDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import PageDep
from service.core.errors import InvalidRequestError
from service.security.api_keys import ANONYMOUS, ApiKey, rights_of, to_key_out

routes = router("/v1/keys", "keys")


@routes.post(
    "",
    dependencies=[ADMIN_ALL],
    status_code=201,
    openapi_extra=example({"name": "door", "scopes": ["identify"], "galleries": ["staff"]}),
)
async def create_key(body: JsonBody[KeyIn], backend: BackendDep, caller: CallerDep) -> CreatedKeyOut:
    """Create a key. Only this response contains its token.

    The first key needs the scope `admin` for all galleries: it ends anonymous access, and no caller without that scope
    can create another key.
    """
    if caller is ANONYMOUS and not rights_of(body).may_everything:
        raise InvalidRequestError(
            "the first key ends anonymous access, so it must be able to create other keys",
            remedy="Create the first key with the scope 'admin' for all galleries, then create the others with it "
            "(docs/keys.md).",
        )
    return _created(await backend.threads.run(backend.store.keys.create, body.name, rights_of(body), body.expires_at))


@routes.get("", dependencies=[ADMIN_ALL])
async def list_keys(
    backend: BackendDep,
    page: PageDep,
    ended: Annotated[bool, Query(description="Include revoked and expired keys.")] = False,
) -> Page[KeyOut]:
    """List the keys, oldest first."""
    seal = (await backend.threads.run(backend.store.keys.ring)).seal
    listed = partial(backend.store.keys.list_keys, ended)
    return await page.read(Page[KeyOut], backend.threads, seal, listed, lambda row: to_key_out(row[1]), itemgetter(0))


@routes.get("/{key}", dependencies=[ADMIN_ALL])
async def get_key(key: KeyId, backend: BackendDep) -> KeyOut:
    """Return a key, without its token."""
    return to_key_out(await backend.threads.run(backend.store.keys.key, key))


@routes.delete("/{key}", dependencies=[ADMIN_ALL])
async def revoke_key(key: KeyId, backend: BackendDep) -> KeyOut:
    """Revoke a key permanently. Every process rejects its next request."""
    return to_key_out(await backend.threads.run(backend.store.keys.revoke, key))


@routes.post("/{key}/rotate", dependencies=[ADMIN_ALL], status_code=201, openapi_extra=example({"overlap_s": 86_400}))
async def rotate_key(key: KeyId, body: JsonBody[RotateIn], backend: BackendDep) -> CreatedKeyOut:
    """Create a key with the same rights. The old key stays valid for `overlap_s`."""
    return _created(await backend.threads.run(backend.store.keys.rotate, key, timedelta(seconds=body.overlap_s)))


def _created(made: tuple[ApiKey, str]) -> CreatedKeyOut:
    key, token = made
    return CreatedKeyOut(**vars(to_key_out(key)), token=token)
