"""Clients that know the correct answers: each has its own people, and records which of them are enrolled.

A client repeats an unanswered write under its idempotency key until an answer arrives. The state is therefore known
exactly, and every later answer is right or wrong. No other client enrolls a client's people. All clients share one
gallery, one index and one database.
"""

from __future__ import annotations

import io
import random
import threading
import time
import uuid
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol, Self, TypeVar

import httpx2 as httpx
import numpy as np

from kith import Kith, KithClientError
from kith.options import ArchiveOptions
from kith.wire.identification import IdentityOut
from models.runtime.network import Float
from models.vision.recognition import l2_normalize

PEOPLE: Final = "people"
BULK: Final = "bulk-"
SAME: Final = 0.97
"""Minimum cosine of a photo to itself, in any batch and on any server."""
NOISE: Final = 0.05
"""Length of what moves the vector of a face: its cosine stays 0.999, so that the mean of a subject is each of them."""
DIFFERENT: Final = 0.93
"""Maximum cosine of two of the photos."""
REFUSALS: Final = {(503, "overloaded"), (503, "storage_busy"), (504, "deadline_exceeded")}
"""Statuses that are normal under this load: the client retries."""
ALLOWED: Final[dict[str, Any]] = {"allow_inconsistent": True, "allow_duplicate": True}
PATIENCE_S: Final = 120.0
PAUSE_S: Final = 0.1
GONE: Final = 20
"""Number of deleted vectors and photos that are searched for again later."""
Answer = TypeVar("Answer")
Probe = bytes | Float
"""A photo, or a vector."""


@dataclass(frozen=True)
class Known:
    """A photo of one face, and its vector from the service when no other load ran."""

    photo: bytes
    vector: Float


class Replicas(Protocol):
    """The servers, of which at most one is down."""

    urls: Sequence[str]
    api_key: str

    def was_away(self, which: int, began: float, ended: float) -> bool: ...


@dataclass
class Book:
    """Record of answers, clients, times and errors, shared by all clients."""

    answers: list[tuple[float, str, int, float]] = field(default_factory=list)
    """End time, request, server, and duration in seconds of each answer."""
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, kind: str, which: int, began: float, outcome: str) -> None:
        now = time.monotonic()
        with self._lock:
            self.outcomes[f"{kind}: {outcome}"] += 1
            if outcome == "answered":
                self.answers.append((now, kind, which, now - began))

    def must(self, right: bool, what: str) -> None:
        if not right:
            with self._lock:
                self.wrong.append(what)


class Asking:
    """Sends a request to one of the servers until one answers; for use by one thread."""

    def __init__(self, replicas: Replicas, book: Book, chance: random.Random) -> None:
        self.replicas = replicas
        self.book = book
        self.chance = chance
        self._clients: list[Kith] = []
        self.unanswered = False
        """True if an earlier attempt of the latest request got no answer."""

    def __enter__(self) -> Self:
        key = self.replicas.api_key
        self._clients = [Kith(url, api_key=key, timeout_s=PATIENCE_S, attempts=1) for url in self.replicas.urls]
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()

    def __call__(self, kind: str, action: Callable[[Kith], Answer], patience_s: float = PATIENCE_S) -> Answer:
        """Send a request. Raise KithClientError for an unexpected status, TimeoutError if no answer arrives."""
        self.unanswered = False
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            which = self.chance.randrange(len(self._clients))
            began = time.monotonic()
            try:
                answer = action(self._clients[which])
            except (KithClientError, httpx.TransportError) as error:
                outcome = self._refusal(error, which, began)
                self.book.answered(kind, which, began, outcome)
                if outcome == "problem":
                    raise
                threading.Event().wait(PAUSE_S)
            else:
                self.book.answered(kind, which, began, "answered")
                return answer
        raise TimeoutError(f"{kind} was not answered for {patience_s:g} s")

    def unless(self, status: int, kind: str, action: Callable[[Kith], object]) -> None:
        """Send a request, which an earlier attempt without an answer may have done: then ``status`` is right."""
        try:
            self(kind, action)
        except KithClientError as error:
            if error.status != status or not self.unanswered:
                raise

    def _refusal(self, error: Exception, which: int, began: float) -> str:
        if isinstance(error, KithClientError) and error.status:
            if (error.status, error.code) in REFUSALS:
                return f"{error.status} {error.code}"
            self.book.must(error.status < 500, f"{error.status}: {error}")
            return "problem"
        self.unanswered = True
        away = self.replicas.was_away(which, began, time.monotonic())
        self.book.must(away, f"server {which} lived and did not answer: {error!r}")
        return "server away" if away else "no answer"


@dataclass
class Subject:
    """One of a client's own people; ``face``: that of all templates; ``templates``: a probe that finds each."""

    id: str
    face: Known
    templates: dict[str, Probe] = field(default_factory=dict)
    exists: bool = False


@dataclass(frozen=True)
class Photos:
    """``theirs``: photos of permanently enrolled subjects; ``strangers``: of people who are not enrolled; ``others``:
    of any size and number of faces."""

    theirs: Sequence[tuple[str, Known]]
    strangers: Sequence[Known]
    others: Sequence[bytes]


class Client:
    """Client that enrolls, queries, changes and deletes sequentially. ``mine``: photos that no other client enrolls."""

    def __init__(self, number: int, ask: Asking, mine: Sequence[Known], photos: Photos) -> None:
        self._ask, self._chance, self.book = ask, ask.chance, ask.book
        self._rng = np.random.default_rng(number)
        self._photos = photos
        self.subjects = [Subject(f"client-{number}-{i}", face) for i, face in enumerate(mine)]
        self._gone: deque[tuple[Known, Probe]] = deque(maxlen=GONE)
        self._steps: dict[Callable[[], None], int] = {
            self.identify_theirs: 13,
            self.identify_mine: 10,
            self.identify_gone: 4,
            self.embed: 4,
            self.detect: 6,
            self.reject: 1,
            self.enroll_photo: 4,
            self.enroll_vectors: 4,
            self.delete_template: 3,
            self.delete_subject: 2,
        }

    def run(self, until: float) -> None:
        steps, weights = list(self._steps), list(self._steps.values())
        with self._ask:
            while time.monotonic() < until:
                step = self._chance.choices(steps, weights)[0]
                try:
                    step()
                except Exception as error:
                    self.book.must(False, f"{step.__name__}: {error!r}")

    # Queries

    def identify_theirs(self) -> None:
        strangers = [(None, known) for known in self._photos.strangers]
        subject, known = self._chance.choice([*self._photos.theirs, *strangers])
        self._search(known.photo, subject)

    def identify_mine(self) -> None:
        found = [(subject.id, probe) for subject in self.subjects for probe in subject.templates.values()]
        if found:
            subject, probe = self._chance.choice(found)
            self._search(probe, subject)

    def identify_gone(self) -> None:
        if self._gone:
            face, probe = self._chance.choice(self._gone)
            owner = next(subject for subject in self.subjects if subject.face is face)
            self._search(probe, owner.id if owner.templates else None)

    def _search(self, probe: Probe, expected: str | None) -> None:
        result = search(self._ask, PEOPLE, probe)
        self.book.must(
            result.subject == expected,
            f"expected {expected or 'no subject'}, got {result.outcome}, {result.subject}, {result.similarity}",
        )

    def embed(self) -> None:
        _, known = self._chance.choice(self._photos.theirs)
        (photo,) = self._ask("embed", lambda kith: kith.embed(known.photo)).images
        nearest = max((float(np.array(face.embedding) @ known.vector) for face in photo.faces), default=0.0)
        self.book.must(nearest >= SAME, f"a photo's vector is another than it was: cosine {nearest:.3f}")

    def detect(self) -> None:
        photo = self._chance.choice(self._photos.others)
        (found,) = self._ask("detect", lambda kith: kith.detect(photo)).images
        self.book.must(found.error is None and bool(found.width), f"a photo could not be read: {found.error}")

    def reject(self) -> None:
        start_of_file = self._chance.choice(self._photos.others)[:100]
        try:
            self._ask("reject", lambda kith: kith.detect(start_of_file))
        except KithClientError as error:
            self.book.must(error.status == 422, f"half a photo: {error}")

    # Writes: the next search on either server sees each one

    def enroll_photo(self) -> None:
        subject = self._chance.choice(self.subjects)
        photo = subject.face.photo
        if all(probe is not photo for probe in subject.templates.values()):
            self._enroll("enroll photo", subject, [photo], [photo], {"face": "largest", "allow_low_quality": True})

    def enroll_vectors(self) -> None:
        subject = self._chance.choice(self.subjects)
        noise = l2_normalize(self._rng.normal(size=(self._chance.randint(1, 3), len(subject.face.vector))))
        vectors = list(np.asarray(l2_normalize(subject.face.vector + NOISE * noise), np.float32))
        self._enroll("enroll vectors", subject, vectors, [], {"embeddings": vectors})

    def _enroll(
        self, kind: str, subject: Subject, probes: Sequence[Probe], photos: Sequence[bytes], options: dict[str, Any]
    ) -> None:
        options |= {"idempotency_key": uuid.uuid4().hex, **ALLOWED}
        answer = self._ask(kind, lambda kith: kith.enroll(PEOPLE, subject.id, *photos, **options))
        problems = [result.error.code for result in answer.results if result.error]
        self.book.must(
            answer.enrolled_count == len(probes), f"{answer.enrolled_count} of {len(probes)} enrolled: {problems}"
        )
        for result, probe in zip(answer.results, probes, strict=True):
            if result.template is not None:
                subject.exists = True
                subject.templates[result.template] = probe
                self._search(probe, subject.id)

    def delete_template(self) -> None:
        filled = [subject for subject in self.subjects if subject.templates]
        if filled:
            subject = self._chance.choice(filled)
            template = self._chance.choice(list(subject.templates))
            self._ask.unless(404, "delete template", lambda kith: kith.delete_template(PEOPLE, subject.id, template))
            self._forget(subject, [subject.templates.pop(template)])

    def delete_subject(self) -> None:
        there = [subject for subject in self.subjects if subject.exists]
        if there:
            subject = self._chance.choice(there)
            self._ask.unless(404, "delete subject", lambda kith: kith.delete_subject(PEOPLE, subject.id))
            subject.exists = False
            probes = list(subject.templates.values())
            subject.templates.clear()
            self._forget(subject, probes)

    def _forget(self, subject: Subject, probes: Sequence[Probe]) -> None:
        self._gone.extend((subject.face, probe) for probe in probes)
        for probe in probes:
            self._search(probe, subject.id if subject.templates else None)


def search(ask: Asking, gallery: str, probe: Probe) -> IdentityOut:
    """Search for the largest face."""
    options: dict[str, Any] = {"risk": {"threshold": SAME}}
    if isinstance(probe, bytes):
        options |= {"faces": "largest", "check_quality": False}
        answer = ask("identify", lambda kith: kith.identify(gallery, probe, **options))
    else:
        answer = ask("search", lambda kith: kith.identify(gallery, embeddings=[probe], **options))
    (result,) = answer.results
    return result


class Mover:
    """Client that makes galleries from archives, copies them by export and import, and deletes them."""

    def __init__(self, ask: Asking, people: Sequence[tuple[str, Known]]) -> None:
        self._ask, self._book, self._people = ask, ask.book, people
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, known in people:
                archive.writestr(f"{name}/photo.jpg", known.photo)
        self._archive = buffer.getvalue()
        self._made = 0

    def run(self, until: float) -> None:
        with self._ask, TemporaryDirectory() as folder:
            while time.monotonic() < until:
                self._made += 1
                try:
                    self._round(BULK + str(self._made % 5), f"copy-{self._made % 5}", Path(folder))
                except Exception as error:
                    self._book.must(False, f"a gallery was to be made, copied and deleted: {error!r}")
                threading.Event().wait(PAUSE_S)

    def _round(self, first: str, second: str, folder: Path) -> None:
        ask, (file, archive) = self._ask, (folder / "export.ndjson", folder / "people.zip")
        archive.write_bytes(self._archive)
        for name in (first, second):
            ask.unless(409, "create gallery", methodcaller("create_gallery", name))
        options: ArchiveOptions = {"allow_duplicate": True, "allow_low_quality": True, "face": "largest"}
        job = ask("enroll archive", lambda kith: kith.enroll_archive(first, archive, **options)).id
        found = ask("job", lambda kith: kith.wait_for(job, PATIENCE_S))
        done = found.counts.get("enrolled", 0) + found.counts.get("already_enrolled", 0)
        self._book.must(
            (found.state, done) == ("succeeded", len(self._people)), f"an archive {found.state}: {found.counts}"
        )
        file.write_bytes(ask("export", lambda kith: b"".join(kith.export_gallery(first))))
        ask("import", lambda kith: kith.import_gallery(second, file))
        for name, known in self._people:
            for gallery in (first, second):
                result = search(ask, gallery, known.photo)
                self._book.must(result.subject == name, f"in {gallery} {result.subject} was found, not {name}")
        for name in (first, second):
            ask.unless(404, "delete gallery", methodcaller("delete_gallery", name))
