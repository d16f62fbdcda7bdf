"""HTTP server: in the foreground for ``kith serve``, or in a thread for embedded use."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Final

import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.core.allocator import return_large_buffers
from service.core.errors import SettingsError
from service.resources import check_database, has_keys
from service.security.process_memory import protect_memory
from service.settings import Settings

SHUTDOWN_REQUESTS_S = 10
"""Time for running requests to end."""
SHUTDOWN_CLOSE_S = 8
"""Time for writing and closing after the last request. Process managers kill the service soon after."""
MAX_CONNECTIONS: Final = 500
"""Open connections above which a request gets 503. Slow heads and connections per address are a proxy's matter
(docker/haproxy.cfg)."""
MAX_HEAD_BYTES: Final = 32_000
log = logging.getLogger(__name__)


def serve(settings: Settings) -> None:
    """Serve until interrupted. Accepted requests are completed first.

    Raises:
        SettingsError: the address is exposed without a key or cannot be bound.
        PackError, RuntimeUnavailableError: the networks cannot be used.
        MasterKeyError, StorageError: the database cannot be opened.
    """
    protect_memory()
    return_large_buffers()
    settings.check_exposure(partial(has_keys, settings))
    listeners = bind_all(settings.host, settings.port)
    check_database(settings)
    log.info("listening on http://%s:%d, reference at /docs", settings.host, listeners[0].getsockname()[1])
    _server(settings, settings.log_level, alone=True).run(sockets=listeners)


@contextmanager
def embedded(settings: Settings) -> Iterator[str]:
    """Serve on a free loopback port while the block runs, and yield the URL. Raises as :func:`serve`."""
    check_database(settings)
    listener = bind("127.0.0.1", 0)
    server = _server(settings, "warning")
    failure: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="kith-server", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        if failure:
            raise failure[0]
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:  # also while it starts: a thread left running would abort the interpreter at exit
        server.should_exit = True
        thread.join(SHUTDOWN_REQUESTS_S + 5)
        listener.close()


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Return the listeners of an address: ``::`` is every address of IPv4, too.

    IPv4 has a listener of its own, so that clients and proxies have their usual addresses. Raises as :func:`bind`.
    """
    first = bind(host, port)
    return [first, bind("0.0.0.0", first.getsockname()[1])] if host == "::" else [first]  # noqa: S104 - as asked for


def bind(host: str, port: int) -> socket.socket:
    """Return a listener whose connections send without delay.

    uvicorn writes head and body apart. Without TCP_NODELAY the body waits for the client's delayed acknowledgment, 40
    ms on kept-alive connections. asyncio sets it only if the protocol is stated, which ``create_server`` leaves at 0.

    Raises SettingsError: the address is in use or not available.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    return listener


class _Server(uvicorn.Server):
    """Server whose start raises the application's errors. uvicorn's own lifespan logs them as tracebacks.

    ``alone``: it has the process. Then it excludes long-lived objects from garbage collection, since scanning them
    would delay requests by a quarter of a second each time, and it always ends: a thread that waits for a database
    cannot be canceled, so that a timer ends the process.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, alone: bool) -> None:
        super().__init__(config)
        self._app = app
        self._alone = alone
        self._lifespan = AsyncExitStack()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        log.info("Application startup complete.")  # uvicorn's own words
        await super().startup(sockets)
        if self._alone:
            gc.collect()
            gc.freeze()
            gc.enable()  # kith serve disables it for the start

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        watchdog = threading.Timer(SHUTDOWN_REQUESTS_S + SHUTDOWN_CLOSE_S, _exit_now)
        watchdog.daemon = True
        if self._alone:
            watchdog.start()
        self._app.state.backend.webhooks.streams.end()  # uvicorn waits for open responses
        await super().shutdown(sockets)
        if not self.force_exit:
            await self._lifespan.aclose()
            log.info("Application shutdown complete.")  # uvicorn's own words
        watchdog.cancel()


def _exit_now() -> None:
    log.error("the service exits without closing: a dependency hangs, probably the database")
    os._exit(1)


def _server(settings: Settings, log_level: str, alone: bool = False) -> _Server:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level=log_level.lower(),
        # Not uvloop: it accepts one connection per loop iteration, which starves new connections under load.
        loop="asyncio",
        timeout_graceful_shutdown=SHUTDOWN_REQUESTS_S,
        server_header=False,
        http="h11",  # strict about framing and Host
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        ws="none",
        lifespan="off",  # _Server starts and stops the application
        proxy_headers=False,  # nothing depends on a client's address
        log_config=None,  # uvicorn logs through service.observability.logs
        access_log=False,  # it would contain paths with subject ids; service.api.http.gate writes its own
    )
    return _Server(config, app, alone)
