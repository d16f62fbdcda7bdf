"""Processes with separate stores and indexes, like the nodes of a service."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Self

import numpy as np
import sqlalchemy as sa

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import KithError, StorageError
from service.domain.gallery import Gallery, IdempotentResponse, NewTemplate, SubjectFilter
from service.index.follower import Followers, in_process
from service.storage.db.engine import Database
from service.storage.repositories.erasures import Receipt
from service.storage.repositories.store import Store
from tests.databases import open_database
from tests.faults.history import NEVER, Kind

ANSWER_TIMEOUT_S = 60
MEMBER = 0.01
"""Similarity above which a subject has a template: 1/sqrt(n) to one of its n templates, 0 to those of others."""
KEPT_LINES = 5
"""Lines that a writer leaves when it trims the change log: too few for followers, which must start over."""
Found = list[list[tuple[str, float]]]
MAX_WRITERS = 4
"""Writers of one gallery."""
# Started once with all imports, so that each worker is forked in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])

DIMENSION = 4096


class Unlocked(Database):
    """Writers without the gallery lock, to prove that the tests detect its absence."""

    @contextmanager
    def change(self, gallery: Gallery, sealed: bool = True, as_read: bool = False) -> Iterator[sa.Connection]:
        with self.write(StorageError("refused")) as connection:
            yield connection


class Node:
    """A store, and indexes that follow it."""

    def __init__(self, url: str, unlocked: bool = False) -> None:
        self.database = open_database(url)
        if unlocked:
            self.database = Unlocked(self.database.engine, self.database.vault)
        self.store = Store(self.database)
        self.followers = Followers(in_process(self.store))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.followers.close()
        self.store.close()

    def enroll(self, gallery: str, subject: str, new: list[NewTemplate], key: str | None = None) -> str | None:
        keyed = None if key is None else IdempotentResponse(key, key, key)
        return self.store.templates.enroll(self.store.galleries.get(gallery), subject, new, keyed)

    def put_subject(self, gallery: str, subject: str, metadata: dict[str, Any], tags: list[str]) -> None:
        self.store.subjects.put(self.store.galleries.get(gallery), subject, None, metadata, tags)

    def delete_subject(self, gallery: str, subject: str) -> Receipt:
        return self.store.subjects.delete(self.store.galleries.get(gallery), subject)

    def delete_template(self, gallery: str, subject: str, template: str) -> None:
        self.store.templates.delete(self.store.galleries.get(gallery), subject, template)

    def move_template(self, gallery: str, subject: str, template: str, to: str) -> None:
        self.store.templates.move(self.store.galleries.get(gallery), subject, template, to)

    def search(self, gallery: str, probes: Float, k: int, chosen: SubjectFilter | None = None) -> Found:
        found = self.store.galleries.get(gallery)
        among = None if chosen is None else self.store.subjects.matching_pks(found, chosen)
        results, _ = self.followers.catch_up_blocking(found).search(probes, k, among)
        named = self.store.subjects.names(found, {hit.subject_pk for hits in results for hit in hits})
        # Skip subjects deleted since the search.
        return [[(named[h.subject_pk].id, h.similarity) for h in hits if h.subject_pk in named] for hits in results]

    def templates(self, gallery: str) -> dict[str, str]:
        """Return the subject of each template, read by SQL."""
        found = self.store.galleries.get(gallery)
        taken = self.store.changes.snapshot(found)
        listed = self.store.templates.by_pk(found, taken.template_pks.tolist())
        return {template.id: template.subject for template in listed.values()}


class Worker:
    """Proxy of a :class:`Node` in another process, with the same methods."""

    def __init__(self, url: str) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_answer, args=(url, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method; raise its exception here."""
        self._pipe.send((method, arguments))
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"{method} was not answered"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._pipe.close()
        self.process.join(ANSWER_TIMEOUT_S)


def _answer(url: str, pipe: Pipe) -> None:
    with Node(url) as node:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                answer = getattr(node, method)(*arguments)
            except Exception as error:
                answer = type(error)(str(error))
            pipe.send(answer)


# Writers that record their operations


@dataclass(frozen=True)
class Asked:
    """Record written before an operation: ``templates`` by name, or ``subject`` for all its templates."""

    number: int
    kind: Kind
    began: float
    templates: tuple[str, ...]
    subject: str | None
    to: str | None = None


@dataclass(frozen=True)
class Answered:
    """Record written after an operation. ``number``: of the request. ``found``: subject by template that a search
    saw; None: the request was rejected and changed nothing.
    """

    number: int
    ended: float
    found: dict[str, str | None] | None


@dataclass(frozen=True)
class Task:
    """Run random steps on one gallery until stopped, killed, or ``steps`` are done.

    ``shared_subjects``: number of subjects among which templates are moved. 0: each request enrolls a new subject,
    and subjects are deleted with all their templates.
    """

    url: str
    gallery: str
    writer: int
    writers: int
    shared_subjects: int
    steps: int
    weights: dict[str, float]


def template_id(writer: int, number: int) -> str:
    return f"{writer:08x}{number:024x}"


def vector_of(template: str, dimension: int) -> Float:
    drawn = np.random.default_rng(int(template, 16)).normal(size=(1, dimension))
    (vector,) = np.asarray(l2_normalize(drawn), np.float32)
    return np.asarray(vector, np.float32)


def axis_of(template: str, dimension: int) -> Float:
    """Return a vector that is orthogonal to those of the other templates of the writers of one gallery."""
    axis = np.zeros(dimension, np.float32)
    axis[int(template[8:], 16) * MAX_WRITERS + int(template[:8], 16)] = 1
    return axis


class Writer:
    """Process that runs a :class:`Task`. Messages are read as they arrive, so that messages before a kill are known."""

    def __init__(self, task: Task, counters: Any) -> None:
        self.said: list[Asked | Answered | str] = []
        self._spoken = threading.Event()
        pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_write, args=(task, counters, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(daemon=True, target=self._read, args=(pipe,))
        self._reader.start()

    def _read(self, pipe: Pipe) -> None:
        while True:
            try:
                self.said.append(pipe.recv())
            except (EOFError, OSError):  # EOFError: killed in the middle of a message
                return
            finally:
                self._spoken.set()

    def wait_for_a_word(self) -> None:
        assert self._spoken.wait(ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.finished()

    def finished(self) -> list[Asked | Answered]:
        """Return all messages after the process ended. Fails if it ended with an error."""
        self.process.join(10 * ANSWER_TIMEOUT_S)
        self._reader.join(ANSWER_TIMEOUT_S)
        errors = [line for line in self.said if isinstance(line, str)]
        assert not errors, errors[0]
        return [line for line in self.said if not isinstance(line, str)]


def _write(task: Task, counters: Any, pipe: Pipe) -> None:
    try:
        _Steps(task, counters, pipe).run()
    except Exception as error:
        pipe.send(f"writer {task.writer} failed: {error!r}")
        raise


class _Steps:
    def __init__(self, task: Task, counters: Any, pipe: Pipe) -> None:
        self._task = task
        self._counters = counters
        self._pipe = pipe
        self._rng = np.random.default_rng((task.writer, int(time.time_ns() % 2**32)))
        self._node = Node(task.url)
        self._gallery = self._node.store.galleries.get(task.gallery)
        self._asked = 0

    def run(self) -> None:
        kinds, weights = list(self._task.weights), np.array(list(self._task.weights.values()))
        for _ in range(self._task.steps):
            match self._rng.choice(kinds, p=weights / weights.sum()):
                case "enroll":
                    self._enroll()
                case "move":
                    self._move()
                case "delete":
                    self._delete()
                case "delete subject":
                    self._delete_subject()
                case "trim":
                    self._node.store.changes.trim(self._node.store.galleries.get(self._gallery.name), KEPT_LINES)
                case "read":
                    self._search()

    def _subject(self) -> str:
        if self._task.shared_subjects:
            return f"s{self._rng.integers(self._task.shared_subjects)}"
        template = self._recent_template()
        return f"s{template}"

    def _recent_template(self) -> str:
        """Return a template that any writer may have enrolled recently."""
        writer = int(self._rng.integers(self._task.writers))
        made = self._counters[writer]
        return template_id(writer, int(self._rng.integers(max(0, made - 12), made + 1)))

    def _enroll(self) -> None:
        first = self._counters[self._task.writer]
        ids = tuple(template_id(self._task.writer, first + i) for i in range(self._rng.integers(1, 4)))
        if not self._task.shared_subjects:
            ids = ids[:1]
        self._counters[self._task.writer] = first + len(ids)
        subject = self._subject() if self._task.shared_subjects else f"s{ids[0]}"
        new = [NewTemplate(t, axis_of(t, self._gallery.dimension), "embedding") for t in ids]
        self._do("enroll", ids, subject, None, lambda: self._node.enroll(self._gallery.name, subject, new))

    def _templates_of(self, subject: str) -> list[str]:
        try:
            return [template.id for template in self._node.store.templates.list_page(self._gallery, subject)]
        except KithError:
            return []

    def _move(self) -> None:
        subject, to = self._subject(), self._subject()
        if subject != to and (owned := self._templates_of(subject)):
            template = str(self._rng.choice(owned))
            moved = self._node.move_template
            self._do("move", (template,), subject, to, lambda: moved(self._gallery.name, subject, template, to))

    def _delete(self) -> None:
        subject = self._subject()
        if owned := self._templates_of(subject):
            template = str(self._rng.choice(owned))
            deleted = self._node.delete_template
            self._do("delete", (template,), subject, None, lambda: deleted(self._gallery.name, subject, template))

    def _delete_subject(self) -> None:
        subject = self._subject()
        deleted = self._node.delete_subject
        self._do("delete subject", (), subject, None, lambda: deleted(self._gallery.name, subject))

    def _search(self) -> None:
        probed = tuple(sorted({self._recent_template() for _ in range(8)}))
        self._do("read", probed, None, None, lambda: seen(self._node, self._gallery, probed))

    def _do(self, kind: Kind, ids: tuple[str, ...], subject: str | None, to: str | None, action: Any) -> None:
        self._asked += 1
        self._pipe.send(Asked(self._asked, kind, time.monotonic(), ids, subject, to))
        found: dict[str, str | None] | None = {}
        try:
            answer = action()
            found = answer if kind == "read" else {}
        except StorageError:
            self._pipe.send(Answered(self._asked, NEVER, {}))
            return
        except KithError:
            found = None
        self._pipe.send(Answered(self._asked, time.monotonic(), found))


def seen(node: Node, gallery: Gallery, templates: tuple[str, ...]) -> dict[str, str | None]:
    """Return the subject of each template by search. Templates whose subject was deleted between the search and the
    lookup of its name are omitted.
    """
    probes = np.stack([axis_of(template, gallery.dimension) for template in templates])
    current = node.store.galleries.get(gallery.name)
    results, _ = node.followers.catch_up_blocking(current).search(probes, 1)
    named = node.store.subjects.names(current, {hit.subject_pk for hits in results for hit in hits})
    found: dict[str, str | None] = {}
    for template, hits in zip(templates, results, strict=True):
        if not hits or hits[0].similarity < MEMBER:
            found[template] = None
        elif hits[0].subject_pk in named:
            found[template] = named[hits[0].subject_pk].id
    return found
