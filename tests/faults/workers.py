"""Stores with indexes, like the nodes of a service, and writers that record their operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import StorageBusyError
from service.domain.gallery import NewTemplate
from tests import nodes
from tests.faults.history import Kind, Step

MEMBER = 0.01
"""Similarity above which a subject has a template: 1/sqrt(n) to one of its n templates, 0 to those of others."""
KEPT_LINES = 5
"""Lines that a writer leaves when it trims the change log: too few for followers, which must start over."""
OWN_SUBJECTS = 2
MAX_WRITERS = 4
"""Writers of one gallery."""
DIMENSION = 4096


class Node(nodes.Node):
    """Node whose writes read the gallery first."""

    def enroll(self, gallery: str, subject: str, new: list[NewTemplate]) -> None:
        self.store.templates.enroll(self.store.galleries.get(gallery), subject, new, None)

    def delete_subject(self, gallery: str, subject: str) -> str:
        return self.store.subjects.delete(self.store.galleries.get(gallery), subject).id

    def move_template(self, gallery: str, subject: str, template: str, to: str) -> None:
        self.store.templates.move(self.store.galleries.get(gallery), subject, template, to)

    def delete_template(self, gallery: str, subject: str, template: str) -> None:
        self.store.templates.delete(self.store.galleries.get(gallery), subject, template)

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
    """Run random steps on one gallery, until killed, or ``steps`` are done."""

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
    """Steps on templates and subjects that no other writer changes."""

    def __init__(self, task: Task, counters: Any, pipe: Pipe) -> None:
        self._task = task
        self._counters = counters
        self._pipe = pipe
        self.rng = np.random.default_rng((task.writer, int(time.time_ns() % 2**32)))
        self._node = Node(task.url)
        self._own = dict[str, str]()
        """Subjects of the templates that are stored."""
        self._number = 0

    def enroll(self) -> None:
        first, count = self._counters[self._task.writer], int(self.rng.integers(1, 4))
        ids = [template_id(self._task.writer, first + i) for i in range(count)]
        subject = f"{self._task.writer}-{self.rng.integers(OWN_SUBJECTS)}"
        self._counters[self._task.writer] = first + count
        new = [NewTemplate(t, axis_of(t), "embedding") for t in ids]
        self._write("enroll", dict.fromkeys(ids, subject), self._node.enroll, subject, new)

    def move(self) -> None:
        template, subject = self._template()
        others = sorted({*self._own.values()} - {subject})
        if template and others:
            to = str(self.rng.choice(others))
            self._write("move", {template: to}, self._node.move_template, subject, template, to)

    def delete(self) -> None:
        template, subject = self._template()
        if template:
            self._write("delete", {template: None}, self._node.delete_template, subject, template)

    def delete_subject(self) -> None:
        template, subject = self._template()
        if template:
            gone = [each for each, owner in self._own.items() if owner == subject]
            self._write("delete subject", dict.fromkeys(gone), self._node.delete_subject, subject)

    def trim(self) -> None:
        self._node.store.changes.trim(self._node.store.galleries.get(self._task.gallery), KEPT_LINES)

    def read(self) -> None:
        probed = sorted({self._recent_template() for _ in range(8)})
        self._do("read", {}, lambda: self._node.seen(self._task.gallery, probed))

    def _template(self) -> tuple[str, str]:
        """Return one of the stored templates and its subject, empty texts if there is none."""
        return [*self._own.items()][self.rng.integers(len(self._own))] if self._own else ("", "")

    def _recent_template(self) -> str:
        """Return a template that any writer may have enrolled recently."""
        writer = int(self.rng.integers(self._task.writers))
        made = self._counters[writer]
        return template_id(writer, int(self.rng.integers(max(0, made - 12), made + 1)))

    def _write(self, kind: Kind, made: Mapping[str, str | None], action: Any, *arguments: Any) -> None:
        self._do(kind, made, lambda: action(self._task.gallery, *arguments))
        kept = {**self._own, **made}
        self._own = {template: subject for template, subject in kept.items() if subject is not None}

    def _do(self, kind: Kind, made: Mapping[str, str | None], action: Callable[[], Any]) -> None:
        self._number += 1
        step = Step(self._number, kind, time.monotonic(), made)
        self._pipe.send(step)
        while True:
            with suppress(StorageBusyError):  # nothing was stored
                answer = action()
                break
        seen = answer if kind == "read" else made
        self._pipe.send(replace(step, seen=seen, ended=time.monotonic()))
