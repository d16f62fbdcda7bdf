"""The ASGI application: routes, middleware, and the backend for the time that it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, get_args

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.telemetry import TelemetryConfig

from kith.wire.common import VerifyOutcome
from service.api.compreface.mount import mount_compreface
from service.api.http.gate import Gate
from service.api.http.openapi import install_openapi
from service.api.http.problems import install_error_handlers
from service.api.routes import (
    albums,
    audit,
    crops,
    enrollments,
    erasures,
    events,
    faces,
    galleries,
    hygiene,
    identify,
    jobs,
    keys,
    migrate,
    risk,
    static,
    strangers,
    subjects,
    system,
    transfer,
    webhooks,
)
from service.core.errors import all_errors
from service.observability.metrics import Metrics
from service.resources import keep_nothing
from service.settings import Settings
from service.wiring import open_backend

STATEFUL: Final = (
    identify.routes,  # first, since a request is compared with the routes one after the other
    galleries.routes,
    hygiene.routes,
    subjects.routes,
    strangers.routes,
    crops.routes,
    enrollments.routes,
    albums.routes,
    erasures.routes,
    risk.routes,
    jobs.routes,
    migrate.routes,
    transfer.routes,
    audit.routes,
    keys.routes,
    webhooks.routes,
    events.routes,
    static.console_routes,
)
"""Routes that a stateless service lacks."""
ROUTES: Final = (faces.routes, *STATEFUL, system.routes, static.routes)
EXPOSED_HEADERS: Final = ("Idempotency-Replayed", "Retry-After", "X-Request-Id")
"""Response headers that scripts of other origins may read."""


def create_app(settings: Settings) -> FastAPI:
    """Build the application. Networks and database are opened once, when it starts."""
    metrics = Metrics([error.code for error in all_errors()], get_args(VerifyOutcome))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            own = settings
            if settings.stateless:
                own = keep_nothing(settings, Path(stack.enter_context(TemporaryDirectory(prefix="kith-"))))
            app.state.backend = await stack.enter_async_context(open_backend(own, metrics))
            yield

    app = FastAPI(
        title="Kith",
        version=version("kith-face"),
        summary="Open-set face recognition with a stated risk of false identification.",
        lifespan=lifespan,
        openapi_url=None,  # service.api.routes.static serves it, behind the gate
        redirect_slashes=False,  # a redirect would lead to the host in the Host header
        # FastAPI's own telemetry, enabled by an environment variable, would record paths and invalid values.
        telemetry=TelemetryConfig(
            tracing=False, metrics=False, logs=False, operation_spans=False, auto_configure=False
        ),
    )
    install_error_handlers(app)
    for routes in ROUTES:
        if routes not in STATEFUL or not settings.stateless:
            app.router.routes.extend(routes.routes)  # include_router would match each path twice
    mount_compreface(app, settings)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    install_openapi(app)
    return app
