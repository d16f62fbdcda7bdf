"""``kith bench``: how fast this machine, or a server, answers with one's own photos."""

from __future__ import annotations

import multiprocessing
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import TextColumn
from rich.table import Table

from service.commands.options import AsJson, Key, Photos, Url
from service.connection import connect
from service.errors import SettingsError
from service.terminal import SAID_NO, print_json, print_table, progress, remark, say

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from service.client import Kith
    from service.load import Asked, Figures

CROWD: Final = "bench"
MOST_PHOTOS: Final = 64
"""In memory at once."""


class Task(StrEnum):
    detect = "detect"
    embed = "embed"
    verify = "verify"
    identify = "identify"


def bench(
    photos: Photos,
    task: Annotated[list[Task] | None, typer.Option(help="What to ask; repeatable. Default: all four.")] = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="How many ask at once; repeatable. Default: 1 and 8.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600.0, help="For each task and number of clients.")] = 5.0,
    gallery: Annotated[
        str | None, typer.Option("--gallery", "-g", help="To identify in; with --url needed for that.")
    ] = None,
    people: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Without --gallery: made-up people to search among.")
    ] = 1000,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Photos a second, and how long an answer takes: load on a server, or on one of its own.

    Without --url a server is started for it, in another process, by the settings; without --gallery its database is
    thrown away. It measures the machine as it is: what else runs on it counts. Exit 1 if a request failed."""
    tasks = [each.value for each in dict.fromkeys(task or Task)]
    if url is not None and gallery is None and "identify" in tasks:
        if task is not None:
            raise typer.BadParameter("a server's own gallery is needed to identify in", param_hint="--gallery")
        tasks.remove("identify")
        remark("identify is left out: it needs a gallery of the server's (--gallery)")
    payloads = [photo.read_bytes() for photo in photos[:MOST_PHOTOS]]
    if len(photos) > MOST_PHOTOS:
        remark(f"of {len(photos)} photos the first {MOST_PHOTOS} are sent")
    figures: list[Figures] = []
    with _server(url, api_key, gallery) as (address, key), connect(address, key) as kith:
        if gallery is None and "identify" in tasks:
            gallery = _crowd(kith, people)
        faces = _faces_each(kith, photos[:MOST_PHOTOS])
        about = _about(kith, address if url else None, payloads, faces)
        for each in tasks:
            requests = _requests(each, payloads, gallery, key)
            at_once = sorted(set(clients or (1, 8)))
            figures += [_measured(each, address, requests, number, seconds) for number in at_once]
    if as_json:
        print_json({"about": about, "figures": [asdict(each) for each in figures]})
    else:
        _print(about, figures)
    if any(each.failed for each in figures):
        raise typer.Exit(SAID_NO)


def _measured(task: str, url: str, requests: Sequence[Asked], clients: int, seconds: float) -> Figures:
    from service.load import measure_load

    with progress(TextColumn("{task.fields[clients]}"), transient=True) as shown:
        said = f"{clients} client{'' if clients == 1 else 's'}"
        bar = shown.add_task(task, total=seconds, clients=said)
        return measure_load(task, url, requests, clients, seconds, lambda over: shown.update(bar, completed=over))


def _requests(task: str, payloads: Sequence[bytes], gallery: str | None, key: str | None) -> list[Asked]:
    from service.load import Asked

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if task == "verify":
        others = [*payloads[1:], payloads[0]]
        return [_pair(a, b, headers) for a, b in zip(payloads, others, strict=True)]
    path = f"/v1/galleries/{gallery}/identify" if task == "identify" else f"/v1/{task}"
    headers["Content-Type"] = "application/octet-stream"
    return [Asked(path, headers, payload, 1) for payload in payloads]


def _pair(a: bytes, b: bytes, headers: dict[str, str]) -> Asked:
    import httpx2 as httpx

    from service.load import Asked

    form = httpx.Request("POST", "http://kith/v1/verify", files={"a": ("a", a), "b": ("b", b)})
    return Asked("/v1/verify", headers | {"Content-Type": form.headers["Content-Type"]}, form.read(), 2)


def _faces_each(kith: Kith, photos: Sequence[Path]) -> float:
    """On average; and everything was run once. Raises KithClientError: one of them is no photo."""
    return sum(len(kith.detect(photo).images[0].faces) for photo in photos) / len(photos)


def _crowd(kith: Kith, people: int) -> str:
    """A gallery of so many directions at random, who look like nobody."""
    import base64
    import json

    import numpy as np

    served = kith.model()
    rng = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile("w", suffix=".ndjson") as file:
        file.write(
            json.dumps(
                {"kith": "gallery", "version": 1, "recogniser": served.recogniser, "dimension": served.dimension}
            )
        )
        for number in range(people):
            vector = rng.standard_normal(served.dimension).astype("<f4")
            embedding = base64.b64encode((vector / np.linalg.norm(vector)).tobytes()).decode()
            file.write("\n" + json.dumps({"subject": f"{number:07}", "embedding": embedding}))
        file.write("\n")
        file.flush()
        kith.import_gallery(CROWD, file.name, create=True)
    return CROWD


def _about(kith: Kith, url: str | None, payloads: Sequence[bytes], faces: float) -> dict[str, Any]:
    served = kith.model()
    return {
        "server": url or "its own",
        "version": kith.ready().version,
        "machine": _machine(),
        "pack": served.model,
        "detector": f"{served.detection.engine} {served.detection.precision}",
        "recogniser": f"{served.recognition.engine} {served.recognition.precision}",
        "photos": len(payloads),
        "bytes_each": round(sum(map(len, payloads)) / len(payloads)),
        "faces_each": round(faces, 2),
    }


def _machine() -> str:
    """That of the clients."""
    from models.runtime import available_cores

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {available_cores()} cores, {platform.system()}"


@contextmanager
def _server(url: str | None, key: str | None, gallery: str | None) -> Iterator[tuple[str, str | None]]:
    """The one that was named, or one in a process of its own, that has its own interpreter's lock."""
    if url is not None:
        yield url, key
        return
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=_serve, args=(theirs, None if gallery else folder), daemon=True)
        process.start()
        theirs.close()
        try:
            try:
                found = ours.recv()
            except EOFError as error:
                raise SettingsError("the server that was to be measured ended while it started") from error
            if isinstance(found, Exception):
                raise found
            yield found
        finally:
            ours.close()
            process.join()


def _serve(pipe: Connection, folder: str | None) -> None:
    """In ``folder``, or by the settings' database, until the other end is closed."""
    import signal
    from secrets import token_hex

    from models.errors import ModelError
    from service.errors import KithError
    from service.server import embedded
    from service.settings import load_settings

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked for it ends it
    key = token_hex(32)
    try:
        settings = load_settings(api_key=key)
        if folder is not None:
            apart = {"data_dir": Path(folder), "models_dir": settings.models_path, "database_url": None}
            settings = load_settings(api_key=key, **apart)
        with embedded(settings) as url:
            pipe.send((url, key))
            with suppress(EOFError):
                pipe.recv()
    except (KithError, ModelError) as error:
        pipe.send(error)


def _print(about: dict[str, Any], figures: Sequence[Figures]) -> None:
    say(
        f"{about['photos']} photos of {about['bytes_each']:,} bytes and {about['faces_each']:g} faces on average; "
        f"Kith {about['version']}, {about['pack']}: detector {about['detector']}, recogniser {about['recogniser']}; "
        f"{about['machine']}"
    )
    table = Table("Task", "Clients", "Photos/s", "p50 ms", "p95 ms", "p99 ms", "Requests", "Failed")
    for each in figures:
        times = ("" if ms is None else f"{ms:.1f}" for ms in (each.p50_ms, each.p95_ms, each.p99_ms))
        failed = ", ".join(f"{count} of status {status}" for status, count in each.failed.items())
        table.add_row(
            each.task, str(each.clients), f"{each.photos_per_second:.1f}", *times, str(each.requests), failed or "none"
        )
    print_table(table)
