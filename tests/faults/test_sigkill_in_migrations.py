"""Kills at any instant of a migration and its rollback. The gallery is before or after each step, every template can
be searched, and the next process continues.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, Self

import numpy as np
import pytest

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import CROP_SIZE_PX, TEMPLATE_XY
from models.vision.recognition import Recognizer
from service.domain.gallery import Crop, Gallery, GallerySettings, NewTemplate
from service.inference import crops
from service.inference.batcher import Batcher, DevicePool
from service.inference.recognizers import Recognizers, ServedRecognizer
from service.jobs.runner import Runner
from service.risk.gallery_risks import GalleryRisks
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from service.usecases.migration import Migrations, aligned
from tests.databases import open_database
from tests.faults import LONG
from tests.faults.killing import Killed
from tests.faults.workers import template_id
from tests.packs import projected_pack
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

TEMPLATES_AT_FIRST = 60
LEASE_S = 0.3
RUN_TIMEOUT_S = 120
FOLLOWED_BY: Final = {"none": {"next", "previous"}, "next": {"previous"}, "previous": {"next", "none"}}
"""States of the other generation during a migration."""


def crop_of(template: str) -> Crop:
    """Noise with landmarks at a face's positions, which suffices for an embedding."""
    rng = np.random.default_rng(int(template, 16))
    photo = rng.integers(0, 256, (20, 20, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    landmarks = (TEMPLATE_XY * 120 / CROP_SIZE_PX + 20).astype(np.float32)
    return crops.cut_crop(photo, np.array([20.0, 20.0, 140.0, 140.0], np.float32), landmarks)


class Place:
    """Repositories that a server uses for migrations."""

    def __init__(self, url: str, also: Path) -> None:
        database = open_database(url)
        self.store, self.generations, self.jobs = Store(database), GenerationStore(database), JobStore(database)
        served = []
        for directory in (BUNDLED_PACK, also):
            pack = load_pack(directory)
            network = OnnxNetwork(pack.recognition.path, threads=1)
            recognizer = Recognizer(network, pack.recognition)
            batcher = Batcher("recognizer", DevicePool(), [recognizer.embed_each], (1, 4, 16), 64)
            served.append(ServedRecognizer(pack, network, recognizer, None, batcher))
        self.recognizers = Recognizers(*served)
        self.risks = GalleryRisks(self.store, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.risks.close()
        self.store.close()

    def embedding(self, template: str, fingerprint: str) -> Float:
        served = self.recognizers.get(fingerprint)
        assert served is not None
        (vector,) = served.recognizer.embed(aligned(crop_of(template), served)[None])
        return np.asarray(vector, np.float32)

    def enroll(self, gallery: Gallery, number: int) -> str:
        template = template_id(5, number)
        vector, crop = self.embedding(template, gallery.fingerprint), crop_of(template)
        self.store.templates.enroll(
            gallery, f"s{number % 20}", [NewTemplate(template, vector, "photo", {"score": 0.5}, 0.9, crop=crop)], None
        )
        return template

    def run_jobs(self, gallery: Gallery) -> None:
        async def run() -> None:
            async with asyncio.timeout(RUN_TIMEOUT_S), AsyncExitStack() as opened:
                devices = opened.enter_context(DevicePool())
                batchers = [
                    Batcher("recognizer", devices, [s.recognizer.embed_each], (1, 4, 16), 64) for s in self.recognizers
                ]
                served = [
                    replace(each, batcher=await opened.enter_async_context(batcher))
                    for each, batcher in zip(self.recognizers, batchers, strict=True)
                ]
                kinds = Migrations(self.store, self.generations, Recognizers(*served), self.risks).kinds()
                await opened.enter_async_context(Runner(self.jobs, kinds, lease_s=LEASE_S, poll_s=0.02))
                while self.jobs.list_jobs(gallery, ("queued", "running"), None, 1):
                    await asyncio.sleep(0.01)

        asyncio.run(run())

    def state(self, gallery: Gallery) -> str:
        _, *others = self.generations.list_live(gallery)
        return others[0].state if others else "none"

    def step(self, gallery: Gallery, rng: np.random.Generator) -> None:
        """Advance to the next state, after unfinished jobs have ended."""
        state = self.state(gallery)
        if state != "previous":
            (to,) = (served for served in self.recognizers if served.fingerprint != gallery.fingerprint)
            self.generations.start(gallery, to.fingerprint, to.dimension, to.pack.model_id)
        self.run_jobs(gallery)
        gallery = self.store.galleries.get(gallery.name)
        if state == "previous" and rng.random() < 0.5:
            self.generations.roll_back(gallery)
        elif state == "previous":
            self.generations.finish(gallery, force=False)


def _walk(url: str, also: Path, steps: int, pipe: Pipe) -> None:
    rng = np.random.default_rng()
    with Place(url, also) as place:
        for _ in range(steps):
            gallery = place.store.galleries.get("g")
            pipe.send(("enrolled", place.enroll(gallery, gallery.templates)))
            place.step(place.store.galleries.get("g"), rng)
            pipe.send(("state", place.state(gallery)))


@pytest.fixture(scope="module")
def also(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return projected_pack(tmp_path_factory.mktemp("packs")).directory


def test_a_migration_killed_midway_goes_on(some_database_url: DatabaseUrl, also: Path) -> None:
    url, rng = some_database_url(), np.random.default_rng()
    with Place(url, also) as place:
        first = place.recognizers.default
        settings = GallerySettings(keep_crops=True)
        gallery = place.store.galleries.create("g", first.fingerprint, first.dimension, settings)
        enrolled = {place.enroll(gallery, number) for number in range(TEMPLATES_AT_FIRST)}
        state = "none"
        for _ in range(16 if LONG else 1):
            said = Killed(_walk, url, also, 1000).after(int(rng.integers(1, 6)), rng.uniform(0, 0.4))
            enrolled |= {what for kind, what in said if kind == "enrolled"}
            state = next((what for kind, what in reversed(said) if kind == "state"), state)
            state = _judge(place, enrolled, state)
            assert problems(url) == []
        Killed(_walk, url, also, 4 if LONG else 1).at_its_end()
        _judge(place, enrolled, None)
    assert problems(url) == []


def _judge(place: Place, enrolled: set[str], state: str | None) -> str:
    """Check that the stored state is ``state`` or its successor, and return it."""
    gallery = place.store.galleries.get("g")
    found = place.state(gallery)
    assert state is None or found == state or found in FOLLOWED_BY[state]
    # Acknowledged templates are stored, plus at most the enrollment in progress.
    there = {template_id(5, number) for number in range(gallery.templates)}
    assert enrolled <= there
    waiting = place.jobs.list_jobs(gallery, ("queued", "running"), None, 10)
    assert place.generations.embedded_count(gallery) == gallery.templates or waiting
    for generation in place.generations.list_live(gallery):
        taken = place.store.changes.snapshot(gallery.at_generation(generation.number))
        named = place.store.templates.by_pk(gallery, taken.template_pks.tolist())
        for row in range(0, len(taken.template_pks), 9):
            expected = place.embedding(named[int(taken.template_pks[row])].id, generation.fingerprint)
            assert float(taken.vectors[row] @ expected) > 0.999
    return found
