"""Soak test: half an hour of mixed load with faults, checked for growth, wrong answers and slowdown.

Two servers share one database; the clients of bench/soak_load.py know the correct answers. One server is killed and
restarted repeatedly, the other one stays up, and some bursts exceed the queue. After each round the load stops: the
script compares the gallery with the clients' records through both servers, and reads the servers' resources. The pass
criteria were fixed before the first run:

- no answer is wrong, no 5xx except those documented for load, and only a server that is down leaves requests
  unanswered;
- once warm, the regression line of each resource of the living server at rest rises by at most RISE in total;
- the p99 of identifying a photo in the last third is at most SLOWER times that of the first third after the warm-up;
- at the end both servers stop on request, `kith doctor`, `kith audit verify` and tests/soundness.py find nothing, and
  the spool contains only uploads that broke off with their server.

Prints, and writes bench/results/soak.json and .md; exits 1 if a criterion fails.

    python -m bench.soak [--minutes 30] [--database sqlite | postgresql]
"""

from __future__ import annotations

import argparse
import io
import math
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from bench.common import RESULTS, figures_table, say, table, write
from bench.load import Generator, Order, multipart
from bench.machine import about, in_words
from bench.photos import lfw_or_exit, people
from bench.servers import STOP_S
from bench.soak_load import DIFFERENT, PATIENCE_S, PEOPLE, Asking, Book, Client, Known, Mover, Photos, search
from kith import Kith
from models.pack.loading import BUNDLED_PACK
from tests.databases import ENVIRONMENT
from tests.faults.servers import Server
from tests.postgres import Postgres
from tests.soundness import problems

API_KEY: Final = "the operator's, of more than 32 characters"
KILLED_EVERY: Final = 3
"""Rounds between kills; SIGKILL and SIGTERM alternate."""
BURST_EVERY: Final = 2
WARM: Final = 1 / 3
"""Share of the rounds that warm up: networks are compiled for every canvas, caches fill, allocators find their size."""
SLOWER: Final = 1.5
MOVED: Final = 5
"""People in the archive that becomes a gallery and is deleted."""
BURST: Final = 128
RISE: Final = {"memory_mb": 24.0, "descriptors": 2.0, "threads": 2.0}
"""Maximum rise of each resource at rest, over the rounds after the warm-up."""
SIDES_PX: Final = (80, 2000)
FORMATS: Final = (("JPEG", "RGB"), ("JPEG", "RGB"), ("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGBA"), ("WEBP", "RGB"))
Figures = dict[str, Any]
JUDGED_FROM: Final = 500
"""Minimum number of answers in a third for a meaningful p99."""


class Reading(NamedTuple):
    """Resources of a server."""

    memory_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Plan:
    """``rounds`` of ``round_s`` seconds, by ``clients`` clients with ``own`` people each. ``fixed``: number of people
    enrolled permanently, and of strangers; ``others``: number of photos of any size. ``rest_s``: time after a round in
    which the minimum of each resource counts, because connections and threads close with a delay."""

    rounds: int
    round_s: float
    clients: int = 8
    own: int = 6
    fixed: int = 24
    others: int = 120
    rest_s: float = 4.0

    @classmethod
    def of(cls, minutes: float, clients: int = 8) -> Plan:
        rounds = max(6, round(minutes))
        return cls(rounds, minutes * 60 / rounds, clients)

    @property
    def warm(self) -> int:
        """Return the first round that counts."""
        return round(WARM * self.rounds)


class Replica(Server):
    """``kith serve`` on its own port, restarted repeatedly."""

    def __init__(self, folder: Path, database_url: str | None) -> None:
        self._output = folder / f"server-{len(list(folder.glob('*.log')))}.log"
        settings = {"KITH_API_KEY": API_KEY, "KITH_PACK": str(BUNDLED_PACK)}
        super().__init__(folder / "data", database_url, self._output, **ENVIRONMENT, **settings)
        self.away: list[tuple[float, float]] = []

    def restart(self, how: signal.Signals) -> None:
        began = time.monotonic()
        place = len(self.away)
        self.away.append((began, np.inf))
        self._process.send_signal(how)
        self._process.wait(STOP_S)
        self.launch()
        self.wait_until_ready()
        self.away[place] = (began, time.monotonic())

    def stop(self) -> bool:
        """Stop the server; return True if it exits cleanly on SIGTERM. Kill it otherwise."""
        try:
            return self.terminate(STOP_S) in (0, -signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def found_by(self, *command: str) -> str:
        """Return a command's output if its exit status is not 0, else an empty string."""
        program = [sys.executable, "-m", "service.cli.main", *command]
        done = subprocess.run(program, env=self._environment, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    def complaints(self) -> list[str]:
        """Return the log lines of unexpected errors."""
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if "Traceback" in line or '"level": "ERROR"' in line or " ERROR " in line][:20]

    def holds(self) -> Reading:
        process = Path(f"/proc/{self._process.pid}")
        counts = [len(list((process / name).iterdir())) for name in ("fd", "task")]
        return Reading(self.resident_bytes() / 1e6, *counts)


class Pair:
    """The server that stays up, and the one that is restarted."""

    api_key = API_KEY

    def __init__(self, folder: Path, database_url: str | None) -> None:
        self.living = Replica(folder, database_url)
        self.living.wait_until_ready()  # which also creates the tables
        self.killed = Replica(folder, database_url)
        self.killed.wait_until_ready()
        self.both = (self.living, self.killed)
        self.urls: Sequence[str] = [replica.url for replica in self.both]

    def was_away(self, which: int, began: float, ended: float) -> bool:
        return any(began < back and gone < ended for gone, back in list(self.both[which].away))


@dataclass
class Series:
    """``rest``: readings of the living server after each round; ``rounds``: start and end of each."""

    rest: list[Reading] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    bursts: list[dict[str, int]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options = parser.parse_args()
    data = lfw_or_exit().parent
    with database(options.database) as url:
        figures = soak(Plan.of(options.minutes), data, url)
    figures |= {**about(), "database": options.database}
    write(RESULTS / "soak.md", markdown(figures), figures)
    print(markdown(figures))
    sys.exit(bool(figures["failures"]))


@contextmanager
def database(kind: str) -> Iterator[str | None]:
    """Create a new database; yield None for SQLite in the data directory."""
    if kind == "sqlite":
        yield None
        return
    # The prefix is short: a socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kith-soak-", ignore_cleanup_errors=True) as folder:
        cluster = Postgres(Path(folder), durable=True)
        cluster.start()
        try:
            yield cluster.create("kith")
        finally:
            cluster.stop("immediate")


def soak(plan: Plan, data: Path, database_url: str | None) -> Figures:
    chance, book, series = random.Random(0), Book(), Series()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        pair = Pair(Path(name), database_url)
        for replica in pair.both:
            stack.callback(replica.stop)
        faces = iter(known_faces(pair.living.url, data, plan.clients * plan.own + 2 * plan.fixed + MOVED))
        photos = the_photos(pair.living.url, list(islice(faces, 2 * plan.fixed)), data, plan, chance)
        moved = [(f"moved-{i}", one) for i, one in enumerate(islice(faces, MOVED))]
        clients = [
            Client(i, Asking(pair, book, random.Random(i)), list(islice(faces, plan.own)), photos)
            for i in range(plan.clients)
        ]
        mover = Mover(Asking(pair, book, random.Random(-1)), moved)
        load: list[Client | Mover] = [*clients, mover]
        with Generator() as generator, ThreadPoolExecutor(plan.clients + 1) as threads:
            send_burst = partial(burst, pair.living, generator, photos, book)
            for number in range(plan.rounds):
                run_round(number, plan, pair, load, threads, send_burst, series)
                compare(pair, clients, photos, book)
                series.rest.append(at_rest(pair.living, plan.rest_s))
                say(f"  round {number + 1} of {plan.rounds}: {len(book.answers)} answers; at rest {series.rest[-1]}")
        ends(pair, Path(name) / "data", book)
        book.must(not (wrong := problems(database_url or f"sqlite:///{name}/data/kith.db")), f"the database: {wrong}")
        return judged(plan, book, series, pair)


def known_faces(url: str, data: Path, count: int) -> list[Known]:
    """Return the first photos of LFW that show one face and are not similar to each other."""
    found: list[Known] = []
    with Kith(url, api_key=API_KEY) as kith:
        for person in people(data):
            faces = kith.embed(photo := person.photos[0].read_bytes()).images[0].faces
            vector = np.array(faces[0].embedding if faces else [], np.float32)
            is_clear = len(faces) == 1 and faces[0].score >= 0.65
            if is_clear and all(float(vector @ one.vector) < DIFFERENT for one in found):
                found.append(Known(photo, vector))
            if len(found) == count:
                return found
    raise RuntimeError(f"{len(found)} faces are fewer than {count}")


def the_photos(url: str, faces: Sequence[Known], data: Path, plan: Plan, chance: random.Random) -> Photos:
    """Sort the photos into permanently enrolled people, people that the clients enroll, and all others."""
    theirs = [(f"fixed-{i}", known) for i, known in enumerate(faces[: plan.fixed])]
    with Kith(url, api_key=API_KEY) as kith:
        kith.create_gallery(PEOPLE)
        for subject, known in theirs:
            kith.enroll(PEOPLE, subject, known.photo, allow_duplicate=True, allow_low_quality=True)
    everybody = people(data)
    others = [scaled(chance.choice(everybody).photos[0], chance) for _ in range(plan.others)]
    return Photos(theirs, faces[plan.fixed : 2 * plan.fixed], others)


def scaled(path: Path, chance: random.Random) -> bytes:
    """Return a photo in a random format and size: one in fifty is larger than 1500 pixels."""
    low, high = (math.log(side) for side in SIDES_PX)
    longest = math.exp(min(chance.uniform(low, high), chance.uniform(low, high)))
    size = (round(longest * chance.uniform(0.6, 1)), round(longest))
    kind, mode = chance.choice(FORMATS)
    buffer = io.BytesIO()
    with Image.open(path) as image:
        image.resize(size, Image.Resampling.BILINEAR).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def run_round(
    number: int,
    plan: Plan,
    pair: Pair,
    load: Sequence[Client | Mover],
    threads: ThreadPoolExecutor,
    send_burst: Callable[[], dict[str, int]],
    series: Series,
) -> None:
    began = time.monotonic()
    running = [threads.submit(one.run, began + plan.round_s) for one in load]
    # The killed server is back by the middle of the round.
    threading.Event().wait(plan.round_s / 4)
    if number % KILLED_EVERY == 1:
        pair.killed.restart(signal.SIGTERM if number // KILLED_EVERY % 2 else signal.SIGKILL)
    if number % BURST_EVERY == 0:
        series.bursts.append(send_burst())
    for one in running:
        one.result()
    series.rounds.append((began, time.monotonic()))


def burst(replica: Replica, generator: Generator, photos: Photos, book: Book) -> dict[str, int]:
    """Send more requests at once than the queue holds: each one is answered or gets a retry status."""
    requests = [multipart("/v1/detect", photo, headers=f"X-API-Key: {API_KEY}\r\n") for photo in photos.others]
    port = urlsplit(replica.url).port or 0
    tally = generator.run(Order(port, requests, BURST, PATIENCE_S, 0.0, b"", limit=2 * BURST))
    book.must(tally.statuses.keys() <= {200, 503}, f"a burst was answered by {dict(tally.statuses)}")
    return {str(status): count for status, count in sorted(tally.statuses.items())}


def compare(pair: Pair, clients: Sequence[Client], photos: Photos, book: Book) -> None:
    """Compare every subject, through both servers, with the clients' records."""
    expected = {name: 1 for name, _ in photos.theirs}
    subjects = [subject for client in clients for subject in client.subjects if subject.exists]
    expected |= {subject.id: len(subject.templates) for subject in subjects}
    for replica in pair.both:
        with Kith(replica.url, api_key=API_KEY) as kith:
            found = {subject.id: subject.template_count for subject in kith.subjects(PEOPLE)}
            differing = {name for name in found | expected if found.get(name) != expected.get(name)}
            book.must(not differing, f"listed otherwise than enrolled: {sorted(differing)[:5]}")
    with Asking(pair, book, random.Random(0)) as ask:
        for subject in subjects:
            for probe in subject.templates.values():
                found_by = search(ask, PEOPLE, probe).subject
                book.must(found_by == subject.id, f"at rest {found_by} was found, not {subject.id}")


def at_rest(replica: Replica, seconds: float) -> Reading:
    looks = [replica.holds()]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        threading.Event().wait(0.1)
        looks.append(replica.holds())
    return Reading(*np.min(looks, axis=0).tolist())


def ends(pair: Pair, folder: Path, book: Book) -> None:
    for replica in pair.both:
        book.must(replica.stop(), "a server did not stop on SIGTERM")
    for command in (("doctor",), ("audit", "verify")):
        book.must(not (finding := pair.living.found_by(*command)), f"kith {' '.join(command)}: {finding}")
    # The spool keeps an interrupted upload, encrypted, for an hour (service/jobs/spool.py).
    broken_off = book.outcomes["enroll archive: server away"]
    left = sorted(path.name for path in (folder / "spool").glob("*"))
    book.must(len(left) <= broken_off, f"left in the spool, and {broken_off} uploads broke off: {left}")
    for replica in pair.both:
        book.must(not (complaints := replica.complaints()), f"the log contains errors: {complaints}")


def judged(plan: Plan, book: Book, series: Series, pair: Pair) -> Figures:
    rises = judged_rises(plan, series.rest)
    thirds = p99_of_thirds(plan, book, series)
    failures = [f"{len(book.wrong)} wrong answers, the first: {book.wrong[0]}"] if book.wrong else []
    over = {name: risen for name, risen in rises.items() if risen > RISE[name]}
    failures += [f"{name} at rest rises by {risen:.1f}, more than {RISE[name]:g}" for name, risen in over.items()]
    first, last = thirds[0], thirds[-1]
    if min(first["answers"], last["answers"]) >= JUDGED_FROM and last["p99_ms"] > SLOWER * first["p99_ms"]:
        failures.append(f"p99 went from {first['p99_ms']:.0f} to {last['p99_ms']:.0f} ms")
    return {
        "minutes": round(plan.rounds * plan.round_s / 60, 2),
        "clients": plan.clients,
        "answers": len(book.answers),
        "outcomes": dict(sorted(book.outcomes.items())),
        "wrong": book.wrong[:50],
        "bursts": series.bursts,
        "killed": len(pair.killed.away),
        "rises": [
            {"resource": name, "at_rest": [round(getattr(one, name)) for one in series.rest[plan.warm :]]}
            | {"rise": round(risen, 2), "allowed": RISE[name]}
            for name, risen in rises.items()
        ],
        "thirds": thirds,
        "failures": failures,
    }


def judged_rises(plan: Plan, rest: Sequence[Reading]) -> dict[str, float]:
    """Return the rise of the regression line of each resource of the living server after the warm-up (least squares),
    from the first round to the last."""
    found = {name: np.array([getattr(one, name) for one in rest[plan.warm :]], np.float64) for name in RISE}
    return {
        name: float(np.polyfit(range(len(values)), values, 1)[0]) * (len(values) - 1) if len(values) > 1 else 0.0
        for name, values in found.items()
    }


def p99_of_thirds(plan: Plan, book: Book, series: Series) -> list[Figures]:
    """Return the p99 of identifying a photo under load, in each third of the rounds after the warm-up."""
    figures = []
    for rounds in np.array_split(np.arange(plan.warm, plan.rounds), 3):
        times = [series.rounds[i] for i in rounds]
        took = [
            1000 * seconds
            for at, kind, _, seconds in book.answers
            if kind == "identify" and any(began <= at <= ended for began, ended in times)
        ]
        p50, p99 = (round(float(np.percentile(took or [0.0], q)), 1) for q in (50, 99))
        figures.append({"answers": len(took), "p50_ms": p50, "p99_ms": p99})
    return figures


def markdown(figures: Figures) -> str:
    """Format the verdict and its evidence."""
    failures = figures["failures"]
    return f"""# Soak

`make soak`: {figures["minutes"]:g} minutes on {figures["database"]}, {figures["clients"]} clients,
{figures["killed"]} times a server was killed or stopped. {in_words(figures)}.

{"**Failed:** " + "; ".join(failures) if failures else "**Passed.**"}

{figures["answers"]:,} answers, {len(figures["wrong"])} wrong.

The living server at rest, round by round after the warm-up, and the rise of the regression line:

{figures_table(figures["rises"])}

Identifying a photo, by third of the rounds after the warm-up:

{figures_table(figures["thirds"])}

{table("What was asked: what came | times", figures["outcomes"].items())}

Bursts of {BURST} clients, answers by status: {figures["bursts"]}.
"""


if __name__ == "__main__":
    main()
