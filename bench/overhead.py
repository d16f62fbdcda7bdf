"""Measure the cost of a request without its networks: CPU time of a server that reads results from memory.

The server is the real one (uvicorn, the gate, the routes, the database, the index). Only decoding and networks are
replaced by stored results for one photo.

Two other servers are the comparison. ``plain`` has routes in the style of FastAPI's manual, without middleware: an
UploadFile or a pydantic body, a response model. ``bare`` only receives the body. CPU time, not wall time, shows how
much processor time remains for the networks. Writes JSON.

    python -m bench.overhead [--requests 2000] [--clients 16]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import cProfile
import json
import logging
import platform
import pstats
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import uvicorn
from fastapi import FastAPI, UploadFile

from kith import Kith
from kith.wire.faces import FaceOut, FacesOut, PhotoOut, QualityOut
from models.runtime.onnx_runtime import available_cores
from models.vision.quality_gate import QualityGate
from service.app import create_app
from service.cli.tools.demo import package_file
from service.inference.photo_pipeline import Face, Photo, PhotoPipeline
from service.inference.recognizers import ServedRecognizer
from service.schemas.faces import DetectIn
from service.server import bind
from service.settings import Settings, load_settings

RESULT = Path(__file__).parent / "results" / "overhead.json"
GALLERY = "people"
PEOPLE = 300
ROUTES = {"detect": "/v1/detect", "embed": "/v1/embed", "identify": f"/v1/galleries/{GALLERY}/identify"}
FIELD = "images"
BOUNDARY = "e5b1ac2f7c0f4a1d"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--profile", help="route and body type, such as embed/multipart: print a profile instead")
    parser.add_argument("--serve", choices=["bare", "kith", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.data, arguments.profile is not None)
    elif arguments.profile:
        profile(arguments)
    else:
        measure(arguments)


# Payloads


def photos() -> dict[str, bytes]:
    """Return a photo of the size of a web page's, and one from a camera; both show one face."""
    picture = cv2.imread(str(package_file("skimage", "data", "astronaut.png")))
    assert picture is not None  # noqa: S101
    small = cv2.resize(picture, (250, 250), interpolation=cv2.INTER_AREA)
    large = cv2.resize(picture, (2800, 2800), interpolation=cv2.INTER_CUBIC)
    return {"20 kB": _jpeg(small, 94), "2 MB": _jpeg(large, 96)}


def _jpeg(picture: Any, quality: int) -> bytes:
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def request(path: str, kind: str, photo: bytes) -> bytes:
    media, body = BODIES[kind](photo)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _multipart(photo: bytes) -> tuple[str, bytes]:
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{FIELD}"; filename="photo"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return f"multipart/form-data; boundary={BOUNDARY}", head.encode() + photo + f"\r\n--{BOUNDARY}--\r\n".encode()


def _json(photo: bytes) -> tuple[str, bytes]:
    return "application/json", json.dumps({"images": [base64.b64encode(photo).decode()]}).encode()


BODIES: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "raw": lambda photo: ("image/jpeg", photo),
    "multipart": _multipart,
    "json": _json,
}


# The servers


class Remembering(PhotoPipeline):
    """Pipeline with stored results for known photos."""

    seen: Photo
    embedded: Photo

    async def detect(self, *arguments: Any, **options: Any) -> Photo:
        return self.seen

    async def embed(self, *arguments: Any, **options: Any) -> Photo:
        return self.embedded


def serve(kind: str, data: Path, profiled: bool) -> None:
    listener = bind("127.0.0.1", 0)
    profiler = cProfile.Profile()
    app: Any = bare
    if kind != "bare":
        logging.basicConfig(level="INFO", filename=data / "log", format=LOG_FORMAT)
        app = (kith if kind == "kith" else plain)(load_settings(data_dir=data))

        @app.get("/cpu")  # type: ignore[untyped-decorator]
        async def cpu() -> float:
            return time.process_time()

        @app.get("/profile")  # type: ignore[untyped-decorator]
        async def start() -> None:
            profiler.enable()

    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="warning", server_header=False, access_log=False)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    if profiled:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def kith(settings: Settings) -> FastAPI:
    app = create_app(settings)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            backend = app.state.backend
            await _remember(backend.faces.photos, backend.faces.recognizers.default)
            yield

    app.router.lifespan_context = lifespan
    return app


async def _remember(pipeline: Any, by: ServedRecognizer) -> Photo:
    photo = photos()["20 kB"]
    embedded: Photo = await pipeline.embed(photo, by)
    seen = await pipeline.detect(photo)
    pipeline.__class__, pipeline.seen, pipeline.embedded = Remembering, seen, embedded
    return embedded


def plain(settings: Settings) -> FastAPI:
    """Build the routes in the style of FastAPI's manual."""
    remembered: dict[str, Photo] = {}
    inner = create_app(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner.router.lifespan_context(inner):
            backend = inner.state.backend
            remembered["embed"] = await _remember(backend.faces.photos, backend.faces.recognizers.default)
            remembered["detect"] = replace(
                remembered["embed"], faces=[replace(face, vector=None) for face in remembered["embed"].faces]
            )
            yield

    app = FastAPI(lifespan=lifespan)

    def answer(route: str) -> FacesOut:
        photo = remembered[route]
        faces = [_face(face) for face in photo.faces]
        return FacesOut(model="m", images=[PhotoOut(width=photo.width, height=photo.height, faces=faces)])

    async def detect_multipart(images: list[UploadFile]) -> FacesOut:
        for image in images:
            await image.read()
        return answer("detect")

    async def embed_multipart(images: list[UploadFile]) -> FacesOut:
        for image in images:
            await image.read()
        return answer("embed")

    async def detect_json(body: DetectIn) -> FacesOut:
        return answer("detect")

    async def embed_json(body: DetectIn) -> FacesOut:
        return answer("embed")

    for route in (detect_multipart, embed_multipart, detect_json, embed_json):
        name, kind = route.__name__.split("_")
        app.add_api_route(f"/{name}/{kind}", route, methods=["POST"], response_model_exclude_none=True)
    return app


def _face(face: Face) -> FaceOut:
    reasons = QualityGate().reasons(face.quality)
    return FaceOut(
        box=[round(float(v), 1) for v in face.box_xyxy],
        landmarks=[[round(float(v), 1) for v in point] for point in face.landmarks_xy],
        score=round(face.score, 4),
        quality=QualityOut(**face.quality.as_dict(), usable=not reasons, reasons=reasons),
        embedding=None if face.vector is None else [float(v) for v in face.vector],
    )


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Receive a body and answer two words: the lower bound."""
    if scope["type"] == "lifespan":
        return
    while (await receive()).get("more_body"):
        pass
    answer = json.dumps(time.process_time()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


# The load


async def exchange(port: int, message: bytes, clients: int, requests: int) -> None:
    left = requests

    async def client() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            status, answer = await _exchanged(reader, writer, message)
            if status != 200:
                raise SystemExit(f"{status}: {answer[:500]!r}")
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(clients)))


async def _exchanged(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> tuple[int, bytes]:
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
    return int(head[9:12]), await reader.readexactly(length)


async def cpu_seconds(port: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, answer = await _exchanged(reader, writer, b"GET /cpu HTTP/1.1\r\nHost: localhost\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return float(answer)


async def cpu_ms(port: int, message: bytes, clients: int, requests: int) -> float:
    """Return the server's CPU time per request."""
    before = await cpu_seconds(port)
    await exchange(port, message, clients, requests)
    return (await cpu_seconds(port) - before) * 1000 / requests


@contextmanager
def server(kind: str, data: Path, *options: str) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.overhead", "--serve", kind, "--data", str(data), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101
        try:
            port = int(process.stdout.readline())
            _wait_until_ready(port)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            asyncio.run(cpu_seconds(port))
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server did not start")


def enroll(port: int) -> None:
    vectors = np.random.default_rng(1).normal(size=(PEOPLE, 1024))
    with Kith(f"http://127.0.0.1:{port}") as kith:
        kith.create_gallery(GALLERY, risk={"fpir": 0.01})
        for i, vector in enumerate(vectors[:, : kith.model().dimension]):
            kith.enroll(GALLERY, f"person-{i}", embeddings=[vector], allow_duplicate=True)


def cases() -> dict[str, tuple[str, str, str, str]]:
    """Return server, path, kind of body and size of the photo, by name of the case."""
    found = {}
    for size in photos():
        found[f"bare raw {size}"] = ("bare", "/", "raw", size)
        for route, path in ROUTES.items():
            for kind in BODIES:
                found[f"{route} {kind} {size}"] = ("kith", path, kind, size)
                if route != "identify" and kind != "raw":
                    found[f"plain {route} {kind} {size}"] = ("plain", f"/{route}/{kind}", kind, size)
    return found


def measure(arguments: argparse.Namespace) -> None:
    taken: dict[str, list[float]] = {name: [] for name in cases()}
    pictures = photos()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        ports = {
            kind: opened.enter_context(server(kind, Path(tempfile.mkdtemp(dir=folder))))
            for kind in ("bare", "plain", "kith")
        }
        enroll(ports["kith"])
        for turn in range(arguments.rounds + 1):
            for name, (kind, path, body, size) in cases().items():
                message = request(path, body, pictures[size])
                number = arguments.requests // (1 if size == "20 kB" else 10) // (1 if turn else 10)
                spent = asyncio.run(cpu_ms(ports[kind], message, arguments.clients, max(number, arguments.clients)))
                if turn:  # the first turn warms up
                    taken[name].append(spent)
    report = {
        "machine": f"{platform.machine()}, {available_cores()} cores",
        "clients": arguments.clients,
        "rounds": arguments.rounds,
        "photos, bytes": {size: len(photo) for size, photo in pictures.items()},
        "server's CPU milliseconds per request": {name: _spread(values) for name, values in taken.items()},
        "plain over kith": {
            name.removeprefix("plain "): _spread(
                [theirs / ours for theirs, ours in zip(values, taken[name.removeprefix("plain ")], strict=True)]
            )
            for name, values in taken.items()
            if name.startswith("plain ")
        },
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"CPU ms per request, {report['machine']}, {arguments.clients} clients: min / median / max")
    for part in ("server's CPU milliseconds per request", "plain over kith"):
        print(part)
        for name, spread in report[part].items():
            print(f"  {name:<32}{spread['min']:8.2f}{spread['median']:8.2f}{spread['max']:8.2f}")


def _spread(samples: list[float]) -> dict[str, float]:
    rounded = [round(value, 3) for value in (min(samples), statistics.median(samples), max(samples))]
    return dict(zip(("min", "median", "max"), rounded, strict=True))


def profile(arguments: argparse.Namespace) -> None:
    route, kind = arguments.profile.split("/")
    message = request(ROUTES[route], kind, photos()["20 kB"])
    with tempfile.TemporaryDirectory() as folder, server("kith", Path(folder), "--profile", "1") as port:
        enroll(port)
        asyncio.run(exchange(port, message, arguments.clients, 100))
        asyncio.run(exchange(port, b"GET /profile HTTP/1.1\r\nHost: localhost\r\n\r\n", 1, 1))
        asyncio.run(exchange(port, message, arguments.clients, arguments.requests))


if __name__ == "__main__":
    main()
