"""Processes that each have a store and indexes of their own, as the nodes of a service have."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any, Self

import numpy as np
import sqlalchemy as sa

from models.network import Float
from models.recognition import unit
from service.errors import KithError, StorageError
from service.gallery.database import Database
from service.gallery.erasure import Receipt
from service.gallery.follower import Followers
from service.gallery.fusion import Fusion
from service.gallery.replicas import in_process
from service.gallery.store import Store
from service.gallery.subjects import Gallery, Idempotent, NewTemplate, SubjectFilter
from tests.databases import open_database
from tests.faults.history import NEVER, Kind

ANSWER_TIMEOUT_S = 60
EXACT = 0.999
"""A template's similarity to its own vector, and nobody else's."""
KEPT_LINES = 5
"""Of the change log, where a writer shortens it: so few that those who follow it are too late."""
Found = list[list[tuple[str, float]]]
# Started once, with everything imported: a worker is then a fork of it, in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


class Unlocked(Database):
    """What the writers would be if they did not take turns."""

    @contextmanager
    def change(self, gallery: Gallery, sealed: bool = True, erasing: bool = False) -> Iterator[sa.Connection]:
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

    def enrol(self, gallery: str, subject: str, new: list[NewTemplate], key: str | None = None) -> str | None:
        keyed = None if key is None else Idempotent(key, key, key)
        return self.store.enrol(self.store.gallery(gallery), subject, new, keyed)

    def put_subject(self, gallery: str, subject: str, metadata: dict[str, Any], tags: list[str]) -> None:
        self.store.put_subject(self.store.gallery(gallery), subject, None, metadata, tags)

    def delete_subject(self, gallery: str, subject: str) -> Receipt:
        return self.store.delete_subject(self.store.gallery(gallery), subject)

    def delete_template(self, gallery: str, subject: str, template: str) -> None:
        self.store.delete_template(self.store.gallery(gallery), subject, template)

    def move_template(self, gallery: str, subject: str, template: str, to: str) -> None:
        self.store.move_template(self.store.gallery(gallery), subject, template, to)

    def change_fusion(self, gallery: str, fusion: Fusion) -> None:
        self.store.update_gallery(gallery, lambda settings: replace(settings, fusion=fusion))

    def search(self, gallery: str, probes: Float, k: int, chosen: SubjectFilter | None = None) -> Found:
        found = self.store.gallery(gallery)
        among = None if chosen is None else self.store.matching_subjects(found, chosen)
        results, _ = self.followers.of(found).search(probes, k, among, found.version)
        named = self.store.named(found, {hit.subject_pk for hits in results for hit in hits})
        # A subject that was deleted since the search is no answer to it.
        return [[(named[h.subject_pk].id, h.similarity) for h in hits if h.subject_pk in named] for hits in results]

    def templates(self, gallery: str) -> dict[str, str]:
        """Of each template, its subject, by SQL."""
        found = self.store.gallery(gallery)
        taken = self.store.snapshot(found)
        listed = self.store.templates_by_pk(found, taken.template_pks.tolist())
        return {template.id: template.subject for template in listed.values()}


class Worker:
    """A :class:`Node` in another process; its methods by name."""

    def __init__(self, url: str) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_answer, args=(url, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises what the method raised."""
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


# Writers that write down what they do


@dataclass(frozen=True)
class Asked:
    """About to be done: ``templates`` are named by it, or ``subject`` for all that it has."""

    number: int
    kind: Kind
    began: float
    templates: tuple[str, ...]
    subject: str | None
    to: str | None = None


@dataclass(frozen=True)
class Answered:
    """``number``: of what was asked. ``found``: by template, where a search saw it; None: it was refused, and changed
    nothing."""

    number: int
    ended: float
    found: dict[str, str | None] | None


@dataclass(frozen=True)
class Task:
    """What a writer does: random steps on one gallery until it is told to stop, is killed, or ``steps`` are done.

    ``shared_subjects``: of the gallery, among which templates are moved; 0: each request enrols a subject of its own,
    and subjects are deleted whole.
    """

    url: str
    gallery: str
    writer: int
    writers: int
    shared_subjects: int
    steps: int
    weights: dict[str, float]
    unlocked: bool = False


def template_id(writer: int, number: int) -> str:
    return f"{writer:08x}{number:024x}"


def vector_of(template: str, dimension: int) -> Float:
    drawn = np.random.default_rng(int(template, 16)).normal(size=(1, dimension))
    (vector,) = np.asarray(unit(drawn), np.float32)
    return np.asarray(vector, np.float32)


class Writer:
    """A process at work on a :class:`Task`. What it says is read as it comes, so that what it said before it was killed
    is known."""

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
            except (EOFError, OSError):  # the latter: in the middle of a word
                return
            finally:
                self._spoken.set()

    def wait_for_a_word(self) -> None:
        assert self._spoken.wait(ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.finished()

    def finished(self) -> list[Asked | Answered]:
        """Everything it said, when it has ended. Fails where it ended by an error."""
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
        self._node = Node(task.url, task.unlocked)
        self._gallery = self._node.store.gallery(task.gallery)
        self._asked = 0

    def run(self) -> None:
        kinds, weights = list(self._task.weights), np.array(list(self._task.weights.values()))
        for _ in range(self._task.steps):
            match self._rng.choice(kinds, p=weights / weights.sum()):
                case "enrol":
                    self._enrol()
                case "move":
                    self._move()
                case "delete":
                    self._delete()
                case "delete subject":
                    self._delete_subject()
                case "trim":
                    self._node.store.trim_log(self._node.store.gallery(self._gallery.name), KEPT_LINES)
                case "read":
                    self._search()

    def _subject(self) -> str:
        if self._task.shared_subjects:
            return f"s{self._rng.integers(self._task.shared_subjects)}"
        template = self._somebodys()
        return f"s{template}"

    def _somebodys(self) -> str:
        """A template that may have been enrolled lately, by any writer."""
        writer = int(self._rng.integers(self._task.writers))
        made = self._counters[writer]
        return template_id(writer, int(self._rng.integers(max(0, made - 12), made + 1)))

    def _enrol(self) -> None:
        first = self._counters[self._task.writer]
        ids = tuple(template_id(self._task.writer, first + i) for i in range(self._rng.integers(1, 4)))
        if not self._task.shared_subjects:
            ids = ids[:1]
        self._counters[self._task.writer] = first + len(ids)
        subject = self._subject() if self._task.shared_subjects else f"s{ids[0]}"
        new = [NewTemplate(t, vector_of(t, self._gallery.dimension), "embedding") for t in ids]
        self._do("enrol", ids, subject, None, lambda: self._node.enrol(self._gallery.name, subject, new))

    def _templates_of(self, subject: str) -> list[str]:
        try:
            return [template.id for template in self._node.store.list_templates(self._gallery, subject)]
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
        probed = tuple(sorted({self._somebodys() for _ in range(8)}))
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
    """By search: whose each template is, if it is anybody's. A template whose subject went away between the search and
    the look at its name is left out."""
    probes = np.stack([vector_of(template, gallery.dimension) for template in templates])
    current = node.store.gallery(gallery.name)
    results, _ = node.followers.of(current).search(probes, 1, None, current.version)
    named = node.store.named(current, {hit.subject_pk for hits in results for hit in hits})
    found: dict[str, str | None] = {}
    for template, hits in zip(templates, results, strict=True):
        if not hits or hits[0].similarity < EXACT:
            found[template] = None
        elif hits[0].subject_pk in named:
            found[template] = named[hits[0].subject_pk].id
    return found
