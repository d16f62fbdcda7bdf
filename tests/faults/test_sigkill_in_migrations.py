"""Killed at any instant of a gallery's move to another recogniser, and back: it is before or after each step, every
template can be searched, and whoever comes next goes on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, Self

import numpy as np
import pytest

from models.alignment import CROP_SIZE_PX, TEMPLATE_XY
from models.network import Float
from models.pack import BUNDLED, load_pack
from models.recognition import Recogniser
from models.runtime import OnnxNetwork
from service import crops
from service.batching import Batcher, Devices
from service.gallery.generations import Generations
from service.gallery.job_store import JobStore
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.gallery.subjects import Crop, Gallery, GallerySettings, NewTemplate
from service.jobs import Runner
from service.migration import Migrations, aligned
from service.recognisers import Recognisers, Served
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.tally import Tally
from tests.faults.test_sigkill import findings
from tests.faults.workers import template_id
from tests.packs import projected_pack
from tests.postgres import DatabaseUrl

TEMPLATES_AT_FIRST = 60
LEASE_S = 0.3
RUN_TIMEOUT_S = 120
FOLLOWED_BY: Final = {
    "none": {"shadow"},
    "shadow": {"previous"},
    "previous": {"set_aside", "none"},
    "set_aside": {"shadow"},
}
"""What becomes of the other generation in a walk through a migration's states."""


def crop_of(template: str) -> Crop:
    """Noise, with landmarks where a face has them: an embedding needs no more."""
    rng = np.random.default_rng(int(template, 16))
    photo = rng.integers(0, 256, (20, 20, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    landmarks = (TEMPLATE_XY * 120 / CROP_SIZE_PX + 20).astype(np.float32)
    return crops.cut(photo, np.array([20.0, 20.0, 140.0, 140.0], np.float32), landmarks)


class Place:
    """What a server has for migrations."""

    def __init__(self, url: str, also: Path) -> None:
        database = open_database(url)
        self.store, self.generations, self.jobs = Store(database), Generations(database), JobStore(database)
        served = []
        for directory in (BUNDLED, also):
            pack = load_pack(directory)
            network = OnnxNetwork(pack.recognition.path, threads=1)
            recogniser = Recogniser(network, pack.recognition)
            batcher = Batcher("recogniser", Devices(), [recogniser.embed_each], (1, 4, 16), 64)
            served.append(Served(pack, network, recogniser, None, batcher))
        self.recognisers = Recognisers(*served)
        self.risks = GalleryRisks(self.store, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.risks.close()
        self.store.close()

    def embedding(self, template: str, fingerprint: str) -> Float:
        served = self.recognisers.get(fingerprint)
        assert served is not None
        (vector,) = served.recogniser.embed(aligned(crop_of(template), served)[None])
        return np.asarray(vector, np.float32)

    def enrol(self, gallery: Gallery, number: int) -> str:
        template = template_id(5, number)
        vector, crop = self.embedding(template, gallery.fingerprint), crop_of(template)
        self.store.enrol(
            gallery, f"s{number % 20}", [NewTemplate(template, vector, "photo", {"score": 0.5}, 0.9, crop=crop)], None
        )
        return template

    def run_jobs(self, gallery: Gallery) -> None:
        async def run() -> None:
            async with asyncio.timeout(RUN_TIMEOUT_S), AsyncExitStack() as opened:
                devices = opened.enter_context(Devices())
                batchers = [
                    Batcher("recogniser", devices, [s.recogniser.embed_each], (1, 4, 16), 64) for s in self.recognisers
                ]
                served = [
                    replace(each, batcher=await opened.enter_async_context(batcher))
                    for each, batcher in zip(self.recognisers, batchers, strict=True)
                ]
                kinds = Migrations(self.store, self.generations, Recognisers(*served), self.risks).kinds()
                await opened.enter_async_context(Runner(self.jobs, kinds, lease_s=LEASE_S, poll_s=0.02))
                while self.jobs.list_jobs(gallery, ("queued", "running"), None, 1):
                    await asyncio.sleep(0.01)

        asyncio.run(run())

    def state(self, gallery: Gallery) -> str:
        _, *others = self.generations.kept(gallery)
        return others[0].state if others else "none"

    def step(self, gallery: Gallery, rng: np.random.Generator) -> None:
        """To the next state. What is not finished goes on first."""
        state = self.state(gallery)
        if state in ("none", "shadow", "set_aside"):
            (to,) = (served for served in self.recognisers if served.fingerprint != gallery.fingerprint)
            self.generations.start(gallery, to.fingerprint, to.dimension, to.pack.model_id, on_sight=False)
        self.run_jobs(gallery)
        gallery = self.store.gallery(gallery.name)
        if state == "shadow":
            self.generations.cut_over(gallery, 1.0, None)
        elif state == "previous" and rng.random() < 0.5:
            self.generations.roll_back(gallery)
        elif state == "previous":
            self.generations.finish(gallery, force=False)


def _walk(url: str, also: Path, steps: int, pipe: Pipe) -> None:
    rng = np.random.default_rng()
    with Place(url, also) as place:
        for _ in range(steps):
            gallery = place.store.gallery("g")
            pipe.send(("enrolled", place.enrol(gallery, gallery.templates)))
            place.step(place.store.gallery("g"), rng)
            pipe.send(("state", place.state(gallery)))


@pytest.fixture(scope="module")
def also(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return projected_pack(tmp_path_factory.mktemp("packs")).directory


def test_a_migration_killed_midway_goes_on(some_database_url: DatabaseUrl, also: Path, tally: Tally) -> None:
    url, rng = some_database_url(), np.random.default_rng()
    with Place(url, also) as place:
        first = place.recognisers.default
        settings = GallerySettings(fusion="max", keep_crops=True)
        gallery = place.store.create_gallery("g", first.fingerprint, first.dimension, settings)
        enrolled = {place.enrol(gallery, number) for number in range(TEMPLATES_AT_FIRST)}
        state = "none"
        for _ in range(16 if LONG else 1):
            said = Killed(_walk, url, also, 1000).after(int(rng.integers(1, 6)), rng.uniform(0, 0.4))
            tally.kills["migration to another recogniser"] += 1
            enrolled |= {what for kind, what in said if kind == "enrolled"}
            state = next((what for kind, what in reversed(said) if kind == "state"), state)
            with tally.judging():
                state = _judge(place, enrolled, state)
                assert findings(url) == []
        Killed(_walk, url, also, 4 if LONG else 1).at_its_end()
        _judge(place, enrolled, None)
    assert findings(url) == []


def _judge(place: Place, enrolled: set[str], state: str | None) -> str:
    """The state that is there, which is ``state`` or follows it."""
    gallery = place.store.gallery("g")
    found = place.state(gallery)
    assert state is None or found == state or found in FOLLOWED_BY[state]
    # What was acknowledged is there; at most the enrolment that was under way is there beside it.
    there = {template_id(5, number) for number in range(gallery.templates)}
    assert enrolled <= there
    covered = place.generations.coverage(gallery, gallery.generation)
    waiting = place.jobs.list_jobs(gallery, ("queued", "running"), None, 10)
    assert covered.embedded == covered.templates or waiting
    for generation in place.generations.kept(gallery):
        taken = place.store.snapshot(gallery.under(generation.number))
        named = place.store.templates_by_pk(gallery, taken.template_pks.tolist())
        for row in range(0, len(taken.template_pks), 9):
            expected = place.embedding(named[int(taken.template_pks[row])].id, generation.fingerprint)
            assert float(taken.vectors[row] @ expected) > 0.999
    return found
