"""Idempotency-Key of creations: a repeated request gets the first answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request, Response
from pydantic import BaseModel

from service.api.http.parameters import IdempotencyKey
from service.api.http.routing import CallerDep
from service.storage.repositories.answers import AnsweredError, Once

REPLAYED: Final = {"Idempotency-Replayed": "true"}


class Repeatable:
    """Request that may have an Idempotency-Key. ``content``: digest of the body, set by a route that streams it."""

    def __init__(self, request: Request, caller: str, key: str | None) -> None:
        self._request, self._caller, self._key = request, caller, key
        self.content = ""

    def once(self, render: Callable[[Any], BaseModel]) -> Once | None:
        """Return the creation to pass to a store; None without a key. ``render``: as of a response."""
        if self._key is None:
            return None
        request = self._request
        digest = hashlib.sha256(f"{request.url.query}\0{self.content}".encode()).hexdigest()
        name = f"{self._caller} {request.method} {request.scope['path']}"
        return Once(name, self._key, digest, lambda made: render(made).model_dump_json().encode())


async def _with_body(request: Request, caller: CallerDep, idempotency_key: IdempotencyKey = None) -> Repeatable:
    found = Repeatable(request, caller.name, idempotency_key)
    if idempotency_key is not None:
        found.content = hashlib.sha256(await request.body()).hexdigest()
    return found


async def _streamed(request: Request, caller: CallerDep, idempotency_key: IdempotencyKey = None) -> Repeatable:
    return Repeatable(request, caller.name, idempotency_key)


RepeatableDep = Annotated[Repeatable, Depends(_with_body)]
StreamedDep = Annotated[Repeatable, Depends(_streamed)]


async def replay(request: Request, answered: Exception) -> Response:
    """Send the stored answer with the status of the first one. Handler of AnsweredError."""
    status = request.scope["route"].status_code or 200
    return Response(cast(AnsweredError, answered).answer, status, headers=REPLAYED, media_type="application/json")
