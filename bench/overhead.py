"""Measure the cost of a request without its networks: CPU time of a server that reads results from memory.

The server is the real one (uvicorn, the gate, the routes, the database, the index). Only decoding and networks are
replaced by stored results for one photo. The server ``bare``, which only receives the body, is the lower bound. CPU
time, not wall time, shows how much processor time remains for the networks. Writes JSON.

    python -m bench.overhead [--requests 2000] [--clients 16]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import uvicorn
from fastapi import FastAPI

from bench.common import RESULTS
from bench.load import HOST, Generator, Order, look_at, multipart, post
from bench.machine import machine
from bench.photos import astronaut
from bench.servers import GALLERY, Running, started
from kith import Kith
from service.app import create_app
from service.inference.photo_pipeline import Photo, PhotoPipeline
from service.server import bind
from service.settings import load_settings
from tests.faults.servers import free_port

RESULT: Final = RESULTS / "overhead.json"
PEOPLE: Final = 300
PHOTOS: Final = {"20 kB": 250, "2 MB": 2800}
"""Sides in pixels of a photo of the size of a web page's, and of one from a camera; both show one face."""
ROUTES: Final = {"detect": "/v1/detect", "embed": "/v1/embed", "identify": f"/v1/galleries/{GALLERY}/identify"}
BODIES: Final = ("raw", "multipart", "json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--serve", choices=["bare", "kith"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(bare if options.serve == "bare" else kith())
        return
    taken = measure(options.requests, options.rounds, options.clients)
    report = {
        "machine": machine(),
        "clients": options.clients,
        "rounds": options.rounds,
        "server's CPU milliseconds per request": {name: spread(values) for name, values in taken.items()},
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"CPU ms per request, {report['machine']}, {options.clients} clients: min / median / max")
    for name, values in taken.items():
        low, middle, high = spread(values).values()
        print(f"  {name:<32}{low:8.2f}{middle:8.2f}{high:8.2f}")


# The servers


class Remembering(PhotoPipeline):
    """Pipeline with stored results for known photos."""

    seen: Photo
    embedded: Photo

    async def detect(self, *arguments: Any, **options: Any) -> Photo:
        return self.seen

    async def embed(self, *arguments: Any, **options: Any) -> Photo:
        return self.embedded


def serve(app: Any) -> None:
    config = uvicorn.Config(app, log_level="warning", server_header=False, access_log=False)
    uvicorn.Server(config).run(sockets=[bind(HOST, int(os.environ["KITH_PORT"]))])


def kith() -> FastAPI:
    app = create_app(load_settings())
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            faces = app.state.backend.faces
            pipeline, photo = faces.photos, astronaut(PHOTOS["20 kB"])
            pipeline.embedded = await pipeline.embed(photo, faces.recognizers.default)
            pipeline.seen = await pipeline.detect(photo)
            pipeline.__class__ = Remembering
            yield

    app.router.lifespan_context = lifespan
    return app


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Receive a body and answer two words."""
    if scope["type"] == "lifespan":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


# The load


def measure(requests: int, rounds: int, clients: int) -> dict[str, list[float]]:
    """Return CPU milliseconds per request, of each round, by case."""
    taken: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder, ExitStack() as opened:
        generator = opened.enter_context(Generator())
        servers: dict[str, Running] = {}
        for kind, ready in (("bare", "/"), ("kith", "/readyz")):
            port, command = free_port(), [sys.executable, "-m", "bench.overhead", "--serve", kind]
            given = {"KITH_DATA_DIR": folder, "KITH_PORT": str(port)}
            servers[kind] = opened.enter_context(started(command, given, port, ready))
        enroll(servers["kith"].url)
        cases = messages()
        for turn in range(rounds + 1):
            for name, message in cases.items():
                server = servers["bare" if name.startswith("bare") else "kith"]
                number = max(clients, requests // (10 if "2 MB" in name else 1) // (1 if turn else 10))
                before = look_at(server.pid).cpu_s
                tally = generator.run(Order(server.port, [message], clients, 3600.0, 0.0, b"", limit=number))
                spent = look_at(server.pid).cpu_s - before
                if tally.answered != number:
                    raise SystemExit(f"{name}: {dict(tally.statuses)}")
                if turn:  # the first turn warms up
                    taken.setdefault(name, []).append(1000 * spent / number)
    return taken


def messages() -> dict[str, bytes]:
    """Return the request of each case, by name."""
    found = {}
    for size, side_px in PHOTOS.items():
        photo = astronaut(side_px)
        found[f"bare raw {size}"] = request("/", "raw", photo)
        found |= {f"{route} {kind} {size}": request(ROUTES[route], kind, photo) for route in ROUTES for kind in BODIES}
    return found


def request(path: str, kind: str, photo: bytes) -> bytes:
    if kind == "raw":
        return post(path, "image/jpeg", photo)
    if kind == "multipart":
        return multipart(path, photo)
    return post(path, "application/json", json.dumps({"images": [base64.b64encode(photo).decode()]}).encode())


def enroll(url: str) -> None:
    vectors = np.random.default_rng(1).normal(size=(PEOPLE, 1024))
    with Kith(url) as client:
        client.create_gallery(GALLERY, risk={"fpir": 0.01})
        for i, vector in enumerate(vectors[:, : client.model().dimension]):
            client.enroll(GALLERY, f"person-{i}", embeddings=[vector], allow_duplicate=True)


def spread(samples: Sequence[float]) -> dict[str, float]:
    return {
        "min": round(min(samples), 3),
        "median": round(statistics.median(samples), 3),
        "max": round(max(samples), 3),
    }


if __name__ == "__main__":
    main()
