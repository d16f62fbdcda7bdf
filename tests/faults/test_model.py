"""Random operations against models: one after the other in two processes' stores, and at once in real processes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sqlalchemy as sa

from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.core.errors import SubjectErasedError
from service.domain.events import EventFilter, Position
from service.domain.gallery import GallerySettings, Item, NewTemplate, SubjectFilter
from service.domain.outcomes import RiskTarget
from service.domain.strangers import MAX_TEMPLATES, SIGHTING_STEP, VISIT_GAP, Nearest, Recalled
from service.risk.strangers import recall
from service.storage.privacy.backup import back_up, restore
from service.storage.privacy.retention import Retention
from service.storage.repositories import strangers as strangers_module
from service.storage.repositories.bulk_templates import BulkStore
from service.storage.repositories.strangers import Sighting
from tests.faults.history import NEVER, History, Kind, Step, contradictions
from tests.faults.killing import Process
from tests.faults.workers import DIMENSION, Node, Task, write
from tests.forks import CONTEXT
from tests.nodes import Model
from tests.postgres import DatabaseUrl
from tests.service.index.test_gallery import brute_force, of_some_quality
from tests.soundness import problems

PATIENCE_S = 60
WRITERS = 4


# Sequential operations of two servers, against a model

SUBJECTS: Final = [f"s{i}" for i in range(5)]
NARROW: Final = 8
MAX_STRANGERS, PEOPLE = 4, 6
DAYS: Final = 30
THRESHOLD: Final = 0.6
SETTINGS: Final = GallerySettings(risk=RiskTarget("threshold", THRESHOLD), remember_strangers_days=DAYS)
SEEN: Final = EventFilter(types=frozenset({"stranger_first_seen", "stranger_seen_again"}))
STEPS: Final = {
    "enroll": 14,
    "put": 9,
    "import_again": 11,
    "delete_template": 7,
    "delete_subject": 7,
    "move": 9,
    "merge": 5,
    "add_decoy": 6,
    "delete_decoy": 2,
    "see": 14,
    "promote": 3,
    "merge_strangers": 3,
    "forget": 2,
    "forget_all": 0.5,
    "expire": 0.5,
    "trim": 2,
    "begin": 3,
    "back_up": 4,
    "restore": 2,
    "erase_what_moved": 6,
    "delete_gallery": 0.5,
}


@dataclass
class Known:
    """A remembered stranger."""

    first_seen: datetime
    last_seen: datetime
    seen_count: int
    templates: list[NewTemplate]


class Storage:
    """Two servers on one database. Each finds all that was acknowledged, and nothing that was erased comes back: not by
    a request that began earlier, and not by a restored backup.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.now = datetime(2026, 5, 1, 12, tzinfo=UTC)
        self.url, self.file = f"sqlite:///{folder / 'kith.db'}", folder / "backup"
        self.nodes = Node(self.url), Node(self.url)
        self.rng = np.random.default_rng(seed)
        self.done: Counter[str] = Counter()
        self.since: list[tuple[str, str, Sequence[str]]] = []
        """Erasures and merges since the backup: what was erased, or merged, and into what; templates."""
        self.create()
        self.back_up()

    def create(self) -> None:
        self.nodes[0].store.galleries.create("g", "f" * 32, NARROW, SETTINGS)
        self.model, self.records = Model(), dict[str, tuple[str | None, list[str]]]()  # name and tags
        self.strangers, self.events = dict[str, Known](), list[tuple[str, Any]]()  # owner, and type and visits
        self.nodes[0].store.receivers.claim("stream")
        self.moved, self.deleted = set[str](), list[tuple[str, NewTemplate]]()
        self.begin()

    def begin(self) -> None:
        """Read the gallery for late requests."""
        self.early, self.erased = self.nodes[0].store.galleries.get("g"), set[str]()

    def play(self, steps: int) -> None:
        weights = np.array([*STEPS.values()])
        for step in self.rng.choice([*STEPS], steps, p=weights / weights.sum()):
            # A request begins at its step, or began early and is late.
            self.node, self.is_late = self.nodes[self.rng.integers(2)], self.rng.random() < 0.4
            self.store = self.node.store
            self.gallery = self.early if self.is_late else self.store.galleries.get("g")
            subject, other = map(str, self.rng.choice(SUBJECTS, 2, replace=False))
            if self.is_late and (gone := sorted(self.erased & {*SUBJECTS} - {other})):
                subject = gone[0]
            self.choose(subject, other)
            pauses = [-VISIT_GAP, SIGHTING_STEP / 2, SIGHTING_STEP, VISIT_GAP, VISIT_GAP, timedelta(days=2)]
            self.now += pauses[self.rng.integers(len(pauses))]
            getattr(self, step)()
            self.check()

    def choose(self, subject: str, other: str) -> None:
        self.subject, self.other, self.owned = subject, other, self.model.enrolled.get(subject, [])

    def new(self, count: int) -> list[NewTemplate]:
        return [of_some_quality(v, self.rng) for v in l2_normalize(self.rng.normal(size=(count, NARROW)))]

    def is_refused(self, *names: str) -> bool:
        return self.is_late and bool(self.erased & {*names})

    def is_done(self, action: Callable[..., object], *arguments: Any, names: Sequence[str]) -> bool:
        """Run an action on subjects, unless it must be refused because they were erased."""
        if not self.is_refused(*names):
            action(self.gallery, *arguments)
            return True
        with pytest.raises(SubjectErasedError):
            action(self.gallery, *arguments)
        self.done["refused"] += 1
        return False

    def enroll(self) -> None:
        new = self.new(int(self.rng.integers(1, 4)))
        if self.is_done(self.store.templates.enroll, self.subject, new, None, names=[self.subject]):
            self.model.enrolled.setdefault(self.subject, []).extend(new)
            self.records.setdefault(self.subject, (None, []))

    def put(self) -> None:
        name, tags = str(self.rng.choice(["Ada", "Bob"])), [each for each in "xyz" if self.rng.random() < 0.4]
        if self.is_done(self.store.subjects.put, self.subject, name, {}, tags, names=[self.subject]):
            self.model.enrolled.setdefault(self.subject, [])
            self.records[self.subject] = name, tags

    def import_again(self) -> None:
        """Import a new template, and one that is present or was deleted."""
        known = [*self.deleted, *((self.subject, one) for one in self.owned)]
        items = [(self.subject, self.new(1)[0])] + ([known[self.rng.integers(len(known))]] if known else [])
        added = BulkStore(self.node.database).add(self.gallery, [Item(*each) for each in items], {})
        for place, (owner, one) in enumerate(items):
            is_present = any(one.id == each.id for each in self.model.enrolled.get(owner, []))
            is_refused = self.is_refused(owner) or (not is_present and self.is_refused(one.id))
            assert (type(added.refused.get(place)) is SubjectErasedError) == is_refused
            assert (place in added.enrolled) == (not is_refused and not is_present)
            self.done["refused import"] += is_refused
            if place in added.enrolled:
                self.model.enrolled.setdefault(owner, []).append(one)
                self.records.setdefault(owner, (None, []))
                self.deleted = [each for each in self.deleted if each[1].id != one.id]

    def delete_template(self) -> None:
        if self.owned:
            one = self.owned.pop()
            self.store.templates.delete(self.gallery, self.subject, one.id)
            self.deleted.append((self.subject, one))
            self.erased.add(one.id)
            self.since.append(("template", "", [one.id]))

    def delete_subject(self) -> None:
        if self.subject in self.records:
            self.store.subjects.delete(self.gallery, self.subject)
            del self.records[self.subject], self.model.enrolled[self.subject]
            self.drop_events(self.subject)
            self.model.outsiders = {one: at for one, at in self.model.outsiders.items() if at[0] != self.subject}
            gone = [one.id for one in self.owned if one.id in self.moved]
            self.erased |= {self.subject, *gone}
            self.since.append(("subject", self.subject, gone))

    def move(self) -> None:
        if self.owned and self.other in self.records:
            one = self.owned.pop(0)
            self.store.templates.move(self.gallery, self.subject, one.id, self.other)
            self.model.enrolled[self.other].append(one)
            self.moved.add(one.id)

    def merge(self) -> None:
        if {self.subject, self.other} <= self.records.keys() and self.is_done(
            self.store.subjects.merge, self.subject, self.other, names=[self.subject, self.other]
        ):
            (name, tags), (kept, own) = self.records.pop(self.subject), self.records[self.other]
            self.records[self.other] = kept or name, own + [tag for tag in tags if tag not in own]
            self.model.enrolled[self.other] += self.model.enrolled.pop(self.subject)
            for decoy, (owner, new) in self.model.outsiders.items():
                self.model.outsiders[decoy] = self.other if owner == self.subject else owner, new
            self.moved |= {one.id for one in self.owned}
            self.become(self.subject, self.other)

    def become(self, name: str, into: str) -> None:
        self.events = [(into if owner == name else owner, event) for owner, event in self.events]
        self.erased.add(name)
        self.since.append(("merge", name, [into]))

    def drop_events(self, *names: str) -> None:
        self.events = [each for each in self.events if each[0] not in names]

    def add_decoy(self) -> None:
        if self.subject in self.records:
            (new,) = self.new(1)
            if self.is_done(self.store.decoys.add, self.subject, new, names=[self.subject]):
                *_, decoy = self.store.decoys.list_all(self.gallery, self.subject)
                self.model.outsiders[decoy.id] = self.subject, new

    def delete_decoy(self) -> None:
        for decoy, (owner, _) in [*self.model.outsiders.items()][:1]:
            self.store.decoys.delete(self.gallery, owner, decoy)
            del self.model.outsiders[decoy]
            self.erased.add(decoy)
            self.since.append(("subject", decoy, []))

    def see(self) -> None:
        """Remember faces, of one photo or not, of a few people."""
        axes, faces, compared = np.eye(NARROW)[self.rng.integers(PEOPLE, size=3)], list[Sighting](), list[Any]()
        for vector in l2_normalize(axes + 0.1 * self.rng.normal(size=axes.shape)):
            quality, photo = {"score": float(self.rng.random())}, int(self.rng.integers(2)) or None
            self.done["faces"] += 1
            faces.append(Sighting(f"{self.done['faces']:032x}", vector, "photo", quality, 0.9, photo=photo))

        def decide(vector: Float, nearest: Nearest | None) -> Recalled:
            compared.append(nearest and (nearest.similarity, nearest.strangers, nearest.mean_templates, nearest.own()))
            found = recall(vector, nearest, None, SETTINGS)
            is_diverse = nearest is not None and found == "met" and len(nearest.own()) < MAX_TEMPLATES
            return "diverse" if is_diverse else found

        seen, _ = self.store.strangers.remember(self.gallery, faces, self.node.followers.nearest, decide, self.now)
        met = set[tuple[str, int | None]]()
        for face, found, nearest in zip(faces, seen, compared, strict=True):
            owned = {name: one.templates for name, one in self.strangers.items()}
            others = {name for name, photo in met if photo == face.photo is not None}  # some may be lost already
            best = brute_force(owned, face.vector, 1, owned.keys() - others)
            assert (nearest is None) == (not best)
            if best:
                ((name, similarity),) = best
                among, mean = len(owned) - len(others), sum(map(len, owned.values())) / len(owned)
                assert nearest[:3] == (pytest.approx(similarity, abs=1e-4), among, pytest.approx(mean))
                assert np.allclose(nearest[3], [one.vector for one in owned[name]], atol=1e-4)
                if similarity >= THRESHOLD:
                    assert found is not None and found.id == name
                    self.meet(name, face)
                    met.add((name, face.photo))
                    continue
            if self.is_late and self.erased:
                assert found is None
                self.done["not founded"] += 1
                continue
            assert found is not None and found.id not in self.strangers
            met.add((found.id, face.photo))
            self.strangers[found.id] = Known(self.now, self.now, 1, [face])
            self.events.append((found.id, ("stranger_first_seen", found.id, 1)))
            while len(self.strangers) > MAX_STRANGERS:
                others = self.strangers.keys() - {found.id}
                self.lose(min(others, key=lambda each: (self.strangers[each].last_seen, [*self.strangers].index(each))))

    def meet(self, name: str, face: Sighting) -> None:
        one = self.strangers[name]
        if len(one.templates) < MAX_TEMPLATES:
            one.templates.append(face)
        if self.now - one.last_seen >= SIGHTING_STEP:
            if self.now - one.last_seen > VISIT_GAP:
                one.seen_count += 1
                self.events.append((name, ("stranger_seen_again", name, one.seen_count)))
            one.last_seen = self.now

    def lose(self, *names: str) -> None:
        for name in names:
            del self.strangers[name]
        self.drop_events(*names)

    def promote(self) -> None:
        for name, one in [*self.strangers.items()][:1]:
            store = self.store.strangers
            if self.is_done(store.promote, name, self.subject, None, self.now, names=[self.subject]):
                self.model.enrolled.setdefault(self.subject, []).extend(one.templates)
                self.records.setdefault(self.subject, (None, []))
                self.leave(name, self.subject)

    def merge_strangers(self) -> None:
        """Of the two with the most templates."""
        known = sorted(self.strangers.items(), key=lambda each: -len(each[1].templates))
        if len(known) < 2:
            return
        (into, other), (name, one) = known[:2]
        self.store.strangers.merge(self.gallery, name, into)
        self.leave(name, into)
        both = sorted(one.templates + other.templates, key=lambda each: -(each.quality or {})["score"])
        kept = {each.id for each in both[:MAX_TEMPLATES]}
        other.templates = [each for each in sorted(both, key=lambda each: each.id) if each.id in kept]
        other.first_seen = min(one.first_seen, other.first_seen)
        other.last_seen = max(one.last_seen, other.last_seen)
        other.seen_count += one.seen_count

    def leave(self, name: str, into: str) -> None:
        """A stranger became another one, or a subject."""
        self.moved |= {each.id for each in self.strangers.pop(name).templates}
        self.become(name, into)

    def forget(self) -> None:
        for name, one in [*self.strangers.items()][:1]:
            self.store.strangers.forget(self.gallery, name)
            self.lose(name)
            self.erased.add(name)
            self.since.append(("subject", name, [each.id for each in one.templates if each.id in self.moved]))

    def forget_all(self) -> None:
        self.store.strangers.forget_all(self.gallery)
        self.lose(*self.strangers)
        self.erased.add("everyone")
        self.since.append(("everyone", "", []))

    def expire(self) -> None:
        Retention(self.node.database).sweep(self.now)
        oldest = self.now - timedelta(days=DAYS)
        self.lose(*(name for name, one in self.strangers.items() if one.last_seen < oldest))

    def trim(self) -> None:
        self.store.changes.trim(self.gallery, 2)

    def back_up(self) -> None:
        back_up(self.nodes[0].database, self.file)
        self.saved, self.since = deepcopy((self.model, self.records, self.moved, self.strangers)), []

    def restore(self) -> None:
        restore(self.node.database, self.file, replace=True)
        self.model, self.records, self.moved, self.strangers = deepcopy(self.saved)
        self.deleted, merged = [], dict[str, set[str]]()
        for kind, name, others in self.since:
            if kind == "gallery":
                self.create()
                return
            if kind == "merge":
                merged.setdefault(others[0], set()).update(merged.get(name, set()), {name})
                continue
            for subject, owned in self.model.enrolled.items():
                self.model.enrolled[subject] = [one for one in owned if one.id not in others]
            for one in self.strangers.values():
                one.templates = [each for each in one.templates if each.id not in others]
            empty = {each for each in merged.get(name, ()) if not self.model.enrolled.get(each)}
            for each in {name} | empty if kind == "subject" else ():
                self.done["erased again"] += each in self.records
                self.done["stranger erased again"] += each in self.strangers
                self.done["decoy erased again"] += each in self.model.outsiders
                self.model.enrolled.pop(each, None)
                self.records.pop(each, None)
                self.strangers.pop(each, None)
                self.model.outsiders.pop(each, None)
            is_kept = kind != "everyone"
            self.strangers = {each: one for each, one in self.strangers.items() if one.templates and is_kept}
        decoys = self.model.outsiders.items()
        self.model.outsiders = {each: (owner, new) for each, (owner, new) in decoys if owner in self.records}
        self.events = []
        self.nodes[0].store.receivers.claim("stream")
        self.begin()

    def erase_what_moved(self) -> None:
        """Move data after a backup, erase most of it where it is, and restore the backup."""
        self.back_up()
        self.is_late, into = False, self.other
        for step in self.rng.choice(["merge", "move", "promote", "merge_strangers"], 3):
            self.gallery = self.store.galleries.get("g")
            others = (into, str(self.rng.choice([one for one in SUBJECTS if one != into])))
            is_from = step == "promote" or (step == "move" and self.rng.random() < 0.5)
            self.choose(*(others if is_from else others[::-1]))
            getattr(self, step)()
        self.gallery = self.store.galleries.get("g")
        self.choose(into, "")
        self.delete_subject()
        self.forget()
        self.delete_decoy()
        self.restore()

    def delete_gallery(self) -> None:
        self.store.galleries.delete("g")
        self.since.append(("gallery", "", []))
        self.create()

    def check(self) -> None:
        probes, k = l2_normalize(self.rng.normal(size=(2, NARROW))), int(self.rng.integers(1, 6))
        for node in self.nodes:
            gallery = node.store.galleries.get("g")
            listed = node.store.subjects.list_page(gallery, None, 99, SubjectFilter())
            assert {one.id: (one.name, one.tags) for one in listed} == self.records
            assert (gallery.subjects, gallery.templates) == (len(listed), sum(map(len, self.model.enrolled.values())))
            named = node.store.subjects.names(gallery, [one.pk for one in listed])
            assert {one.id: one.name for one in named.values()} == {one.id: one.name for one in listed}
            tagged = set(node.store.subjects.matching_pks(gallery, SubjectFilter(("x",))).tolist())
            assert tagged == {one.pk for one in listed if "x" in one.tags}
            self.model.check(node, probes, k)
            known = node.store.strangers.list_page(gallery, None, 99)
            about = [(one.id, one.first_seen, one.last_seen, one.seen_count, one.template_count) for one in known]
            own = [(name, *vars(one).values()) for name, one in reversed(self.strangers.items())]
            assert about == [(*times, len(owned)) for *times, owned in own]
            found = node.store.events.read(Position(0, 0), SEEN).events
            told = [(each.document["type"], each.document["data"]) for each in found]
            assert [(kind, data["id"], data["seen_count"]) for kind, data in told] == [each for _, each in self.events]
            for subject in self.records:
                decoys = [name for name, (owner, _) in self.model.outsiders.items() if owner == subject]
                assert [one.id for one in node.store.decoys.list_all(gallery, subject)] == decoys
        stored = {one.id: subject for subject, owned in self.model.enrolled.items() for one in owned}
        assert self.nodes[0].templates("g") == stored


def test_two_servers_agree_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "MAX_STRANGERS", MAX_STRANGERS)
    done = Counter[str]()
    for seed in (3, random.randrange(2**32)):  # with the first one, everything is refused or erased again that may be
        print("seed", seed)
        (folder := tmp_path / str(seed)).mkdir()
        storage = Storage(folder, seed)
        storage.play(200)
        done += storage.done
        for node in storage.nodes:
            node.__exit__()
        assert problems(storage.url) == []
    again = ("erased again", "stranger erased again", "decoy erased again")
    assert min(done[each] for each in ("refused", "refused import", "not founded", *again)) > 0, done


# Concurrent operations, whose answers must agree


def fresh(url: str, *galleries: str) -> str:
    """Create empty galleries in the database at ``url``."""
    with Node(url) as node:
        for name in galleries:
            node.store.galleries.create(name, "f" * 32, DIMENSION, GallerySettings())
    return url


def after_all(url: str, gallery: str, histories: Sequence[History]) -> list[History]:
    """Return the histories, plus that of a process that reads SQL and searches its index after all writers ended."""
    asked = list(dict.fromkeys(template for history in histories for step in history for template in step.seen))
    with Node(url) as node:
        stored, by_search = node.templates(gallery), node.seen(gallery, asked)
        assert node.store.galleries.get(gallery).templates == len(stored)
    assert by_search == {template: stored.get(template) for template in asked}
    return [*histories, [Step(1, "read", 1e15, by_search, 1e15)]]


@pytest.mark.long
def test_answers_of_concurrent_operations_agree(database_url: DatabaseUrl) -> None:
    """Writers of one gallery are serialized. Writers of another gallery neither wait for them nor get numbers between
    theirs.
    """
    url, running = fresh(database_url(), "one", "another"), dict[str, list[Process]]()
    if not url.startswith("sqlite"):
        commit_late(url)
    weights = {"enroll": 3.0, "move": 3.0, "delete": 1.0, "delete subject": 0.5, "trim": 0.3, "read": 5.0}
    for name in ("one", "another"):
        counters, steps = CONTEXT.Array("q", WRITERS, lock=False), 200
        tasks = [Task(url, name, i, WRITERS, steps, weights) for i in range(WRITERS)]
        running[name] = [Process(write, task, counters) for task in tasks]
    for name, writers in running.items():
        histories = [writer.ended() for writer in writers]
        answered = Counter(step.kind for history in histories for step in history if step.ended < NEVER)
        assert min(answered[kind] for kind in ("enroll", "move", "delete", "delete subject", "read")) > 5
        assert [*contradictions(after_all(url, name, histories))] == []


def commit_late(url: str) -> None:
    """Delay each commit of a transaction that wrote to the change log, by up to 10 ms a line."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(random() * 0.01); RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON changes DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION dawdle()"
        )
    engine.dispose()


def of(kind: Kind, began: float, ended: float, **seen: str | None) -> Step:
    return Step(int(began), kind, began, seen, ended)


ENROLLED, MOVED = of("enroll", 0, 1, t="a", u="a"), of("move", 2, 6, t="b")
LOST, LATE = of("enroll", 0, NEVER, t="a", u="a"), of("enroll", 5, 6, t="a")


@pytest.mark.parametrize(
    ("writes", "read", "agrees"),
    [
        ([ENROLLED], of("read", 2, 3, t="a"), True),
        ([ENROLLED], of("read", 2, 3, t=None), False),
        ([LOST], of("read", 2, 3, t=None, u=None), True),
        ([LOST], of("read", 2, 3, t="a", u="a"), True),
        ([LOST], of("read", 2, 3, t="a", u=None), False),
        ([LATE], of("read", 2, 3, t="a"), False),
        ([ENROLLED, MOVED], of("read", 3, 4, t="a"), True),
        ([ENROLLED, MOVED], of("read", 3, 4, t="b"), True),
        ([ENROLLED, MOVED], of("read", 7, 8, t="a"), False),
    ],
)
def test_answers_that_contradict_each_other_are_found(writes: list[Step], read: Step, agrees: bool) -> None:
    assert (not [*contradictions([writes, [read]])]) == agrees
