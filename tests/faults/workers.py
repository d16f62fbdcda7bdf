"""Stores with indexes, like the nodes of a service, and writers that record their operations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Self

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import KithError, StorageError
from service.domain.gallery import NewTemplate
from tests import nodes
from tests.faults.history import NEVER, Answered, Asked, Kind

MEMBER = 0.01
"""Similarity above which a subject has a template: 1/sqrt(n) to one of its n templates, 0 to those of others."""
KEPT_LINES = 5
"""Lines that a writer leaves when it trims the change log: too few for followers, which must start over."""
SHARED_SUBJECTS = 6
MAX_WRITERS = 4
"""Writers of one gallery."""
DIMENSION = 4096


class Node(nodes.Node):
    """A store, and indexes that follow it."""

    def __init__(self, url: str) -> None:
        super().__init__(url, None)
        self.database = self.store.database

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enroll(self, gallery: str, subject: str, new: list[NewTemplate]) -> None:
        self.store.templates.enroll(self.store.galleries.get(gallery), subject, new, None)

    def delete_subject(self, gallery: str, subject: str) -> str:
        return self.store.subjects.delete(self.store.galleries.get(gallery), subject).id

    def move_template(self, gallery: str, subject: str, template: str, to: str) -> None:
        self.store.templates.move(self.store.galleries.get(gallery), subject, template, to)

    def templates(self, gallery: str) -> dict[str, str]:
        """Return the subject of each template, read by SQL."""
        found = self.store.galleries.get(gallery)
        taken = self.store.changes.snapshot(found)
        listed = self.store.templates.by_pk(found, taken.template_pks.tolist())
        return {template.id: template.subject for template in listed.values()}

    def nearest(self, gallery: str, templates: list[str], probes: Float) -> dict[str, str | None]:
        """Return the subject of each template by a search for its vector. Templates whose subject was deleted between
        the search and the lookup of its name are omitted.
        """
        current = self.store.galleries.get(gallery)
        results, _ = self.followers.catch_up_blocking(current).search(probes, 1)
        named = self.store.subjects.names(current, {hit.subject_pk for hits in results for hit in hits})
        found: dict[str, str | None] = {}
        for template, hits in zip(templates, results, strict=True):
            if not hits or hits[0].similarity < MEMBER:
                found[template] = None
            elif hits[0].subject_pk in named:
                found[template] = named[hits[0].subject_pk].id
        return found

    def seen(self, gallery: str, templates: list[str]) -> dict[str, str | None]:
        return self.nearest(gallery, templates, np.stack([axis_of(template) for template in templates]))


def template_id(writer: int, number: int) -> str:
    return f"{writer:08x}{number:024x}"


def vector_of(template: str, dimension: int) -> Float:
    drawn = np.random.default_rng(int(template, 16)).normal(size=(1, dimension))
    (vector,) = np.asarray(l2_normalize(drawn), np.float32)
    return np.asarray(vector, np.float32)


def axis_of(template: str) -> Float:
    """Return a vector that is orthogonal to those of the other templates of the writers of one gallery."""
    axis = np.zeros(DIMENSION, np.float32)
    axis[int(template[8:], 16) * MAX_WRITERS + int(template[:8], 16)] = 1
    return axis


@dataclass(frozen=True)
class Task:
    """Run random steps on one gallery, whose writers share a few subjects, until killed, or ``steps`` are done."""

    url: str
    gallery: str
    writer: int
    writers: int
    steps: int
    weights: dict[str, float]


def write(task: Task, counters: Any, pipe: Pipe) -> None:
    """Step of a process (tests.faults.killing) that sends a line before and after each operation."""
    steps = _Steps(task, counters, pipe)
    kinds, weights = list(task.weights), np.array(list(task.weights.values()))
    for kind in steps.rng.choice(kinds, task.steps, p=weights / weights.sum()):
        getattr(steps, str(kind).replace(" ", "_"))()


class _Steps:
    def __init__(self, task: Task, counters: Any, pipe: Pipe) -> None:
        self._task = task
        self._counters = counters
        self._pipe = pipe
        self.rng = np.random.default_rng((task.writer, int(time.time_ns() % 2**32)))
        self._node = Node(task.url)
        self._store = self._node.store
        self._gallery = self._store.galleries.get(task.gallery)
        self._asked = 0

    def enroll(self) -> None:
        first, count = self._counters[self._task.writer], int(self.rng.integers(1, 4))
        ids, subject = tuple(template_id(self._task.writer, first + i) for i in range(count)), self._subject()
        self._counters[self._task.writer] = first + count
        new = [NewTemplate(t, axis_of(t), "embedding") for t in ids]
        self._do("enroll", ids, subject, None, lambda: self._node.enroll(self._gallery.name, subject, new))

    def move(self) -> None:
        subject, to, name = self._subject(), self._subject(), self._gallery.name
        if subject != to and (own := self._template_of(subject)):
            self._do("move", (own,), subject, to, lambda: self._node.move_template(name, subject, own, to))

    def delete(self) -> None:
        subject = self._subject()
        if own := self._template_of(subject):
            now = self._store.galleries.get(self._gallery.name)
            self._do("delete", (own,), subject, None, lambda: self._store.templates.delete(now, subject, own))

    def delete_subject(self) -> None:
        subject, name = self._subject(), self._gallery.name
        self._do("delete subject", (), subject, None, lambda: self._node.delete_subject(name, subject))

    def trim(self) -> None:
        self._store.changes.trim(self._store.galleries.get(self._gallery.name), KEPT_LINES)

    def read(self) -> None:
        probed = sorted({self._recent_template() for _ in range(8)})
        self._do("read", tuple(probed), None, None, lambda: self._node.seen(self._gallery.name, probed))

    def _subject(self) -> str:
        return f"s{self.rng.integers(SHARED_SUBJECTS)}"

    def _recent_template(self) -> str:
        """Return a template that any writer may have enrolled recently."""
        writer = int(self.rng.integers(self._task.writers))
        made = self._counters[writer]
        return template_id(writer, int(self.rng.integers(max(0, made - 12), made + 1)))

    def _template_of(self, subject: str) -> str | None:
        try:
            owned = [template.id for template in self._store.templates.list_page(self._gallery, subject)]
        except KithError:
            return None
        return str(self.rng.choice(owned)) if owned else None

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
