"""Running the application: in the foreground for ``kith serve``, or beside the caller for embedded use."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn

from service.app import create_app
from service.errors import SettingsError
from service.http_limits import HttpLimits, limited
from service.opening import check_database, has_keys
from service.recognisers import read_packs
from service.security.memory import keep_to_itself
from service.settings import Settings

START_TIMEOUT_S = 60.0
GRACE_S = 10
CLOSING_S = 8
"""After the last request, for what is still to be written; whoever started the service kills it soon after."""
log = logging.getLogger(__name__)


def serve(settings: Settings) -> None:
    """Serve until interrupted; requests already accepted are answered first.

    Raises:
        SettingsError: the address is exposed without a key, or cannot be bound, or a package that a setting needs is
            not installed.
        PackError: the pack cannot be used.
        MasterKeyError, StorageError: the database cannot be opened.
    """
    keep_to_itself()
    settings.check_exposure(partial(has_keys, settings))
    settings.check_extras()
    # Known errors first, as one line: an application that fails while it starts has only a traceback to give.
    read_packs(settings.pack_paths)
    listener = bind(settings.host, settings.port)
    check_database(settings)
    log.info("listening on http://%s:%d, reference at /docs", settings.host, listener.getsockname()[1])
    _server(settings, kind=_Settled).run(sockets=[listener])


@contextmanager
def embedded(settings: Settings) -> Iterator[str]:
    """Serve on a free loopback port for as long as the block runs; gives the URL. Raises as :func:`serve`."""
    settings.check_extras()
    read_packs(settings.pack_paths)
    check_database(settings)
    listener = bind("127.0.0.1", 0)
    server = _server(settings, log_level="warning")
    failure: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="kith-server", daemon=True)
    thread.start()
    try:
        _wait_for_start(server, thread, failure)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:  # also amid its start: a thread that is left there aborts the interpreter as it ends
        server.should_exit = True
        thread.join(GRACE_S + 5)
        listener.close()


def _wait_for_start(server: uvicorn.Server, thread: threading.Thread, failure: Sequence[BaseException]) -> None:
    """``failure``: what ended the thread, if it did. Raises SettingsError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise SettingsError("the embedded service did not start; its log says why") from next(iter(failure), None)
        time.sleep(0.02)


def bind(host: str, port: int) -> socket.socket:
    """Raises SettingsError if the address cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


class _Settled(uvicorn.Server):
    """What is there once it started stays until it ends: looking through it for garbage would hold up every request for
    a quarter of a second, now and then. It ends in any case: a thread that waits for a database cannot be called off.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = threading.Timer(GRACE_S + CLOSING_S, _give_up)
        late.daemon = True
        late.start()
        await super().shutdown(sockets)
        late.cancel()


def _give_up() -> None:
    log.error("the service ends without closing: something that it uses hangs, the database most likely")
    os._exit(1)


def _server(
    settings: Settings, log_level: str | None = None, kind: type[uvicorn.Server] = uvicorn.Server
) -> uvicorn.Server:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level=(log_level or settings.log_level).lower(),
        # Not uvloop where it is installed: it accepts one connection per turn of the loop, which starves new ones.
        loop="asyncio",
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
        http=limited(
            HttpLimits(
                settings.max_connections,
                settings.max_connections_per_address,
                settings.max_head_bytes,
                settings.client_patience_s,
                settings.client_least_rate,
            ),
            app.state.measures.problems.add,
        ),
        ws="none",
        forwarded_allow_ips=settings.trusted_proxy_list,
        log_config=None,  # its lines go where ours do (service.logs)
        access_log=False,  # its lines hold paths, and so subjects' ids; service.api.middleware writes our own
    )
    return kind(config)
