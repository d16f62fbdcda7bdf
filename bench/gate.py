"""Measure the CPU time of authentication: the gate around an application that answers at once.

Also measures the cost of passing the caller's identity into a thread. CPU time, not wall time; the minimum of several
rounds.

    python -m bench.gate [--requests 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from service.api.http.gate import Gate
from service.core.actor import run_in_thread
from service.observability.metrics import Metrics
from service.security.api_keys import Rights
from service.services.key_usage import KeyUses
from service.settings import load_settings
from service.storage.repositories.api_keys import KeyStore
from tests.databases import open_database

ROUNDS = 5
KEYS = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    requests = parser.parse_args().requests
    logging.getLogger("service.access").setLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        for what, microseconds in asyncio.run(_measured(Path(folder), requests)).items():
            print(f"{what:<44} {microseconds:7.1f} us")


async def _measured(folder: Path, requests: int) -> dict[str, float]:
    operators = "k" * 32
    plain, keyed = load_settings(data_dir=folder), load_settings(data_dir=folder, api_key=operators)
    found = {"nothing around it": await _microseconds(_app, {}, requests)}
    with closing(open_database(f"sqlite:///{folder / 'empty.db'}")) as empty:
        scope = _scope(KeyStore(empty), {})
        found["no key is asked for"] = await _microseconds(Gate(_app, plain, Metrics()), scope, requests)
    with closing(open_database(f"sqlite:///{folder / 'keys.db'}")) as database:
        store, read = KeyStore(database), Rights(frozenset({"read"}), frozenset({"staff"}))
        tokens = [store.create("k", read)[1] for _ in range(KEYS)]
        limited = store.create("k", read, rate=1e6, burst=1_000_000)[1]
        asked = {
            "the operator's key": (keyed, operators),
            f"one of {KEYS} stored keys": (plain, tokens[-1]),
            "the same with a limit": (plain, limited),
        }
        for what, (settings, token) in asked.items():
            found[what] = await _microseconds(
                Gate(_app, settings, Metrics()), _scope(store, {"x-api-key": token}), requests
            )
        version = database.file_version
        database.file_version = lambda wait=True: None  # type: ignore[method-assign]
        found["the same where another wrote (SQLite)"] = await _microseconds(
            Gate(_app, plain, Metrics()), _scope(store, {"x-api-key": limited}), requests // 20
        )
        database.file_version = version  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        found["to a thread and back"] = await _each(lambda: loop.run_in_executor(threads, int), requests)
        found["the same with its caller"] = await _each(lambda: run_in_thread(threads, int), requests)
    return found


def _scope(store: KeyStore, headers: dict[str, str]) -> dict[str, Any]:
    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    context = SimpleNamespace(keys=store, key_uses=KeyUses(store), run=run)
    every = {"host": "127.0.0.1:8000", "content-type": "application/json", "content-length": "10", **headers}
    return {
        "app": SimpleNamespace(state=SimpleNamespace(context=context)),
        "headers": [(name.encode(), value.encode()) for name, value in every.items()],
    }


async def _microseconds(app: Callable[[Scope, Receive, Send], Awaitable[None]], own: Scope, requests: int) -> float:
    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    async def one() -> None:
        about = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "client": ("127.0.0.1", 9)}
        await app({**about, **own}, _receive, send)

    taken = await _each(one, requests)
    assert status == 200, status  # noqa: S101
    return taken


async def _each(one: Callable[[], Awaitable[Any]], times: int) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(times):
            await one()
        least = min(least, time.process_time() - begun)
    return least * 1e6 / times


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    main()
