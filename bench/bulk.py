"""Import all photos of LFW into a gallery through a real server: throughput, refusals, and the effect of a kill.

One server takes the whole folder as `kith enroll` sends it, while a client identifies a photo once a second. Then the
server takes the first people again. Finally it takes the first photos one request at a time, into another gallery. A
second server takes only the first people and is killed halfway (SIGKILL). It must end with the same templates and the
same refusals as the first server, item by item. Prints, and writes bench/results/bulk.md and .json.

    python -m bench.bulk [--limit 500] [--resumed 1500]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx

from bench.common import RESULTS, outside, say
from kith import Kith, KithClientError
from kith.wire.jobs import JobOut
from models.runtime.onnx_runtime import available_cores
from models.vision.photo_files import list_photos
from service.cli.tools.photo_folders import FolderPhoto, TarStream, photos_of
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.databases import ENVIRONMENT, open_database

ONE_BY_ONE: Final = 300
"""Photos that are enrolled with one request each, for comparison."""
IDLE_QUESTIONS: Final = 40
SAID_EVERY_S: Final = 15.0
GALLERY: Final = "lfw"


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._environment = (
            os.environ
            | ENVIRONMENT
            | {
                "KITH_DATA_DIR": str(folder),
                "KITH_PORT": str(port),
                "KITH_LOG_LEVEL": "ERROR",
            }
        )
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "service.cli.main", "serve"], env=self._environment)
        while True:
            if self._process.poll() is not None:
                sys.exit("the server exited unexpectedly")
            try:
                if httpx.get(f"{self.url}/readyz").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def serving() -> Iterator[tuple[Server, Kith, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            with Kith(server.url, timeout_s=600) as kith:
                yield server, kith, Path(folder)
        finally:
            server.kill()


def people_of(photos: Sequence[FolderPhoto]) -> set[str]:
    return {photo.name.partition("/")[0] for photo in photos}


def whole_people(photos: Sequence[FolderPhoto], count: int) -> list[FolderPhoto]:
    """Return the first ``count`` photos, completed with the remaining photos of the last person."""
    people = people_of(photos[:count])
    return [photo for photo in photos if photo.name.partition("/")[0] in people]


def enroll(kith: Kith, photos: Sequence[FolderPhoto]) -> tuple[JobOut, float]:
    """Run a job to its end; return it and its seconds, including the upload of the archive."""
    start, said = time.perf_counter(), 0.0

    def show(job: JobOut) -> None:
        nonlocal said
        if time.perf_counter() - said > SAID_EVERY_S:
            said = time.perf_counter()
            say(f"  {job.done} of {job.total}")

    job = kith.wait_for(kith.enroll_archive(GALLERY, TarStream(photos), strip=0).id, on_update=show)
    if job.state != "succeeded":
        sys.exit(f"the job {job.state}: {job.problem}")
    return job, time.perf_counter() - start


def one_by_one(kith: Kith, photos: Sequence[FolderPhoto]) -> float:
    """Return the photos enrolled per second."""
    kith.create_gallery("one-by-one")
    start = time.perf_counter()
    for photo in photos:
        try:
            kith.enroll("one-by-one", photo.name.partition("/")[0], photo.path)
        except KithClientError as error:
            if error.status >= 500:
                raise
    return len(photos) / (time.perf_counter() - start)


def questions(kith: Kith, photo: Path, enough: threading.Event, pause_s: float, most: int | None = None) -> list[float]:
    """Return the milliseconds of each search by photo, until ``enough`` is set or ``most`` searches are done."""
    taken: list[float] = []
    while not enough.wait(pause_s) and (most is None or len(taken) < most):
        start = time.perf_counter()
        kith.identify(GALLERY, photo)
        taken.append((time.perf_counter() - start) * 1000)
    return taken


def kept(folder: Path, people: set[str]) -> tuple[list[Any], list[Any]]:
    """Return subject and id of the templates of ``people``, and the first job's problem with each of their photos."""
    database = open_database(f"sqlite:///{folder / 'kith.db'}")
    store, jobs = Store(database), JobStore(database)
    gallery, first = store.galleries.get(GALLERY), jobs.list_jobs(None, (), None, 1000)[-1]
    keys = store.changes.snapshot(gallery).template_pks.tolist()
    blocks = (store.templates.by_pk(gallery, keys[start : start + 10_000]) for start in range(0, len(keys), 10_000))
    templates = sorted((one.subject, one.id) for block in blocks for one in block.values())
    items = sorted((item.item, item.problem) for item in jobs.items(first, None, len(keys) + 1_000_000))
    database.close()
    return [row for row in templates if row[0] in people], [row for row in items if row[0].partition("/")[0] in people]


def uninterrupted(photos: Sequence[FolderPhoto], first: Sequence[FolderPhoto]) -> tuple[dict[str, Any], Any]:
    with serving() as (server, kith, folder):
        kith.create_gallery(GALLERY)
        enough, busy = threading.Event(), list[float]()
        idle = questions(kith, photos[0].path, enough, 0.05, IDLE_QUESTIONS)

        def ask() -> None:
            with Kith(server.url) as other:
                busy.extend(questions(other, photos[0].path, enough, 1.0))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            job, seconds = enroll(kith, photos)
        finally:
            enough.set()
            asking.join()
        # Read before the second run, which checks the refused photos again, among more people.
        expected = kept(folder, people_of(first))
        say(f"{job.done / seconds:.1f} photos/s; sending enrolled people again")
        again, again_s = enroll(kith, first)
        gallery = kith.gallery(GALLERY)
        figures = {
            "photos": job.done,
            "seconds": seconds,
            "photos_per_second": job.done / seconds,
            "people": gallery.subjects,
            "templates": gallery.templates,
            "enrolled_share": job.counts.get("enrolled", 0) / job.done,
            "counts": job.counts,
            "again": {"photos_per_second": again.done / again_s, "counts": again.counts},
            "search_ms_idle": latency(idle),
            "search_ms_busy": latency(busy),
            "one_by_one_photos_per_second": one_by_one(kith, photos[:ONE_BY_ONE]),
        }
        return figures, expected


def killed(photos: Sequence[FolderPhoto]) -> tuple[dict[str, Any], Any]:
    with serving() as (server, kith, folder):
        kith.create_gallery(GALLERY)
        job = kith.enroll_archive(GALLERY, TarStream(photos), strip=0)
        while (done := kith.job(job.id).done) < len(photos) / 2:
            time.sleep(0.02)
        server.kill()
        say(f"killed at {done} of {len(photos)}")
        start = time.perf_counter()
        server.start()
        while (now := kith.job(job.id)).done <= done and now.state != "succeeded":
            time.sleep(0.02)
        resumed_s = time.perf_counter() - start
        ended = kith.wait_for(job.id)
        return {"photos": len(photos), "killed_at": done, "seconds_to_resume": resumed_s, "state": ended.state}, kept(
            folder, people_of(photos)
        )


def latency(taken: Sequence[float]) -> dict[str, float]:
    if len(taken) < 2:
        return {"searches": len(taken), "median": float("nan"), "p95": float("nan")}
    return {
        "searches": len(taken),
        "median": statistics.median(taken),
        "p95": statistics.quantiles(taken, n=20, method="inclusive")[-1],
    }


def markdown(report: Mapping[str, Any]) -> str:
    whole, resumed = report["uninterrupted"], report["killed"]
    idle, busy = whole["search_ms_idle"], whole["search_ms_busy"]
    lines = [
        "# Bulk enrollment",
        "",
        "`make bench-bulk`",
        "",
        f"{whole['photos']:,} photos of LFW by name, through a real server on {report['machine']}.",
        "",
        "| | |",
        "| --- | --- |",
        f"| Photos a second, the sending among it | {whole['photos_per_second']:.1f} |",
        f"| The same one request after the other (first {ONE_BY_ONE}) | {whole['one_by_one_photos_per_second']:.1f} |",
        f"| Sent again (first {resumed['photos']:,}) | {whole['again']['photos_per_second']:.1f} |",
        f"| A search by photo, nothing else running: median, 95 % | {idle['median']:.0f} ms, {idle['p95']:.0f} ms |",
        f"| A search by photo beside the job: median, 95 % | {busy['median']:.0f} ms, {busy['p95']:.0f} ms |",
        f"| Enrolled | {whole['enrolled_share']:.1%}, {whole['templates']:,} templates of {whole['people']:,} people |",
        *(
            f"| {code} | {count:,} |"
            for code, count in sorted(whole["counts"].items(), key=lambda row: -row[1])
            if code != "enrolled"
        ),
        "",
        f"Killed at {resumed['killed_at']:,} of the first {resumed['photos']:,} photos, another server went on "
        f"{resumed['seconds_to_resume']:.1f} s after its start, and ended with "
        f"{'the same' if report['same'] else 'OTHER'} templates and refusals as the one that was not killed.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, help="number of photos; default: all")
    parser.add_argument("--resumed", type=int, default=1500, help="photos of the run that is killed halfway")
    parser.add_argument("--output", type=Path, default=RESULTS / "bulk.md")
    arguments = parser.parse_args()
    images = outside("KITH_DATA", "data") / "lfw" / "images"
    if not images.is_dir():
        sys.exit(f"The research data are not at {images}: set KITH_DATA (docs/training.md says what it must hold).")
    photos = photos_of(images, list_photos(images))
    photos = photos if arguments.limit is None else whole_people(photos, arguments.limit)
    first = whole_people(photos, min(arguments.resumed, len(photos)))
    say(f"{len(photos)} photos")
    whole, expected = uninterrupted(photos, first)
    resumed, found = killed(first)
    report = {
        "machine": f"{platform.machine()}, {available_cores()} cores",
        "uninterrupted": whole,
        "killed": resumed,
        "same": expected == found,
    }
    arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    arguments.output.write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    if not report["same"]:
        sys.exit("a kill changed the gallery")


if __name__ == "__main__":
    main()
