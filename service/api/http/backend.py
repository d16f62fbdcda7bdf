"""The backend of the application, for routes."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from service.usecases.backend import Backend


def backend_of(request: Request) -> Backend:
    return cast(Backend, request.app.state.backend)


async def _backend(request: Request) -> Backend:  # async: FastAPI calls synchronous dependencies in a thread
    return backend_of(request)


BackendDep = Annotated[Backend, Depends(_backend)]
