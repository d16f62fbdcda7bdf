"""A gallery migrates to another recognizer on a real server: preparation, cut-over and rollback."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from kith.wire.migration import MigrationOut
from models.runtime.network import Float
from models.vision.recognition import Recognizer
from service.cli.tools.demo import FRIEND_BOXES_PX
from service.core.errors import GalleryMovedError, StorageError
from service.domain.gallery import Crop
from service.risk.gallery_risks import GalleryRisks
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.db.row_sealing import seal_crop
from service.storage.db.tables import crops, templates
from service.storage.repositories.store import Store
from tests.conftest import is_eventually, jpeg
from tests.databases import open_database
from tests.packs import BUNDLED_DIMENSION, PROJECTED, projected_pack
from tests.refusals import refusal
from tests.service.cli.conftest import Program
from tests.service.usecases.test_bulk_enrollment import Bytes, has_done, many

Photo = NDArray[np.uint8]
WAIT_S = 60


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with two more packs: ``projected``, and ``twin`` with vectors of the bundled pack's length."""
    folder = tmp_path_factory.mktemp("migration")
    more = projected_pack(folder), projected_pack(folder, "twin", BUNDLED_DIMENSION)
    packs = ",".join(str(pack.directory) for pack in more)
    return load_settings(data_dir=folder / "data", extra_packs=packs, log_level="WARNING")


@pytest.fixture(scope="module")
def url(settings: Settings) -> Iterator[str]:
    with embedded(settings) as served:
        yield served


@pytest.fixture
def kith(url: str) -> Iterator[Kith]:
    with Kith(url) as client:
        yield client


@pytest.fixture(scope="module")
def people(group: Photo, astronaut: Photo, actor: Photo) -> dict[str, bytes]:
    """A photo of each of four people, one face in each."""
    friends = {name: Image.fromarray(group).crop(box) for name, box in FRIEND_BOXES_PX.items()}
    return {"eileen": jpeg(astronaut), "tom": jpeg(actor)} | {name: jpeg(face) for name, face in friends.items()}


@pytest.fixture(scope="module")
def darker(astronaut: Photo) -> bytes:
    """Eileen in worse light."""
    return jpeg((astronaut[:, ::-1] * 0.8).astype(np.uint8), 80)


def enrolled(kith: Kith, name: str, people: dict[str, bytes], **settings: Any) -> str:
    kith.create_gallery(name, risk={"fpir": 0.01}, **settings)
    for subject, photo in people.items():
        kith.enroll(name, subject, photo, face="largest", allow_low_quality=True)
    return name


def settled(kith: Kith, gallery: str) -> MigrationOut:
    """Return the state when its jobs have ended."""
    is_eventually(lambda: not kith.migration(gallery).jobs)
    return kith.migration(gallery)


def moved(kith: Kith, gallery: str, to: str = "projected", force: bool = False) -> MigrationOut:
    """Migrate to another recognizer, and return the state after the job."""
    kith.migrate(gallery, to, force)
    return settled(kith, gallery)


def test_the_whole_way_there_and_back(kith: Kith, people: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GalleryRisks, "derive_later", lambda *_: None)
    g = enrolled(kith, "whole", people, keep_crops=True)
    first = kith.gallery(g).recognizer
    told = kith.migration(g)
    assert (told.state, told.without_crop_count) == ("none", 0)
    assert refusal(kith.roll_back, g)[1] == "migration_state"
    assert kith.finish_migration(g).state == "none"
    assert refusal(kith.migrate, g, "none-such")[1] == "model_not_served"
    assert refusal(kith.migrate, g, "kith-compact")[1] == "migration_state"

    told = moved(kith, g)
    assert told.other is not None
    assert (told.state, told.current.model, told.other.recognizer) == ("switched", "projected", first)
    assert (told.current.embedded_count, told.current.dimension) == (len(people), PROJECTED)
    assert (kith.gallery(g).recognizer, kith.gallery(g).dimension) == (told.current.recognizer, PROJECTED)
    # The threshold comes from the new vectors, from the first answer on.
    assert told.current.threshold is not None and told.other.threshold is not None
    assert told.current.threshold.source == "both"
    assert told.current.threshold.threshold != told.other.threshold.threshold
    assert refusal(kith.migrate, g, "kith-compact")[1] == "migration_state"  # a roll-back is another thing
    for subject, photo in people.items():
        answer = kith.identify(g, photo, check_quality=False, detail="medium")
        assert (answer.model, answer.results[0].candidates[0].subject) == ("projected", subject)
        assert answer.results[0].similarity is not None and answer.results[0].similarity > 0.98

    kith.delete_subject(g, "sam")
    kith.enroll(g, "sam", people["sam"], face="largest", allow_low_quality=True)
    back = kith.roll_back(g)
    assert (back.state, back.current.recognizer) == ("stopped", first)
    assert kith.roll_back(g).state == "stopped"
    back = settled(kith, g)
    # What was enrolled after the switch is found by the recognizer before, too.
    assert back.current.embedded_count == back.current.template_count == len(people)
    assert kith.identify(g, people["sam"], check_quality=False).results[0].candidates[0].subject == "sam"

    # There again, with what was made before, and for good. A bare similarity does not outlive its recognizer.
    assert moved(kith, g).state == "switched"
    kith.update_gallery(g, risk={"threshold": 0.7})
    assert refusal(kith.roll_back, g)[1] == "migration_state"
    kith.update_gallery(g, risk={"fpir": 0.01})
    done = kith.finish_migration(g)
    assert (done.state, done.other) == ("none", None)
    assert kith.finish_migration(g).state == "none"
    settled(kith, g)
    assert kith.identify(g, people["tom"], check_quality=False).results[0].candidates[0].subject == "tom"
    # Back to the first is a migration like any other.
    kith.update_gallery(g, risk={"threshold": 0.7})
    assert refusal(kith.migrate, g, "kith-compact")[1] == "migration_state"
    kith.update_gallery(g, risk={"fpir": 0.01})
    assert moved(kith, g, "kith-compact").current.embedded_count == len(people)
    events = [line.event.removeprefix("migration_") for line in kith.audit(g) if line.event.startswith("migration")]
    there_and_back = ["started", "cut_over", "rolled_back"]
    assert events[::-1] == [*there_and_back, "started", "cut_over", "finished", "started", "cut_over"]


def test_templates_without_crops_are_listed_before_the_start(
    kith: Kith, url: str, people: dict[str, bytes], darker: bytes, tmp_path: Path
) -> None:
    g, program = enrolled(kith, "cropless", {name: people[name] for name in ("eileen", "tom")}), Program(tmp_path, url)

    def run(*words: str, status: int = 0) -> str:
        return program("gallery", "migrate", g, *words, status=status)

    told = kith.migration(g)
    ids = {(subject, one.id) for subject in ("eileen", "tom") for one in kith.templates(g, subject)}
    assert (told.without_crop_count, {(one.subject, one.template) for one in told.without_crop}) == (2, ids)
    assert "none" in run()
    run("--to", "projected", status=3)
    assert "(migration_incomplete)" in program.stderr
    assert kith.migration(g).other is None
    kith.update_gallery(g, keep_crops=True)
    kith.enroll(g, "eileen", darker)
    # Who is left out is said, and found by no search.
    assert "switched" in (said := run("--to", "projected", "--force")) and "1 of 3" in said
    assert kith.migration(g).without_crop_count == 2
    assert kith.identify(g, darker).results[0].subject == "eileen"
    assert kith.identify(g, people["tom"]).results[0].outcome != "identified"
    assert refusal(kith.finish_migration, g)[1] == "migration_incomplete"
    assert "stopped" in run("--roll-back")
    assert kith.identify(g, people["tom"]).results[0].subject == "tom"
    settled(kith, g)
    assert "tom" in run("--status")
    run("--status", "--finish", status=2)
    assert MigrationOut.model_validate_json(run("--finish", "--force", "--json")).state == "none"


def test_enrollments_during_switches_succeed(kith: Kith, url: str, people: dict[str, bytes]) -> None:
    g = enrolled(kith, "race", {"eileen": people["eileen"]}, keep_crops=True)
    stop, acknowledged, failures = threading.Event(), list[str](), list[Exception]()

    def enroll(writer: int) -> None:
        with Kith(url, attempts=1) as own:
            for name in (f"w{writer}-{number}" for number in count()):
                try:
                    own.enroll(g, name, people["tom"], allow_duplicate=True)
                    acknowledged.append(name)
                except Exception as error:
                    failures.append(error)
                if stop.is_set():
                    return

    def wait_for_enrollment() -> None:
        before = len(acknowledged) + len(failures)
        is_eventually(lambda: len(acknowledged) + len(failures) > before)

    writers = [threading.Thread(daemon=True, target=enroll, args=(w,)) for w in range(2)]
    for thread in writers:
        thread.start()
    wait_for_enrollment()
    for _ in range(2):
        assert moved(kith, g).state == "switched", [kith.job(one.id) for one in kith.jobs(g)]
        wait_for_enrollment()
        kith.roll_back(g)
        wait_for_enrollment()
    moved(kith, g)
    stop.set()
    for thread in writers:
        thread.join()
    assert not failures
    told = kith.migration(g)
    assert {s.id for s in kith.subjects(g)} == {"eileen", *acknowledged}
    assert told.current.embedded_count == told.current.template_count == 1 + len(acknowledged)


def test_an_archive_goes_on_with_the_recognizer_that_its_gallery_moves_to(
    kith: Kith, people: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves while photos are embedded, and seems to while the risk is derived, after a batch and at the start."""
    g = enrolled(kith, "moving", {}, keep_crops=True)
    refresh, counts = GalleryRisks.refresh, list[int]()

    def refresh_or_move(*arguments: Any) -> object:
        if len(counts) < 2 and g in arguments:
            counts.append(kith.gallery(g).template_count)
            raise GalleryMovedError("it moved to another recognizer meanwhile")
        return refresh(*arguments)

    monkeypatch.setattr(GalleryRisks, "refresh", refresh_or_move)
    job = kith.enroll_archive(g, Bytes(many({f"{name}/1.jpg": people[name] for name in ("eileen", "tom")}, 30)))
    has_done(kith, job, 15)
    assert counts[0] == counts[1], "no photo is decided before the risk is derived"
    kith.migrate(g, "projected")
    ended = kith.wait_for(job.id, WAIT_S)
    assert (ended.state, ended.counts) == ("succeeded", {"enrolled": 30})
    told = settled(kith, g)
    assert (told.current.model, told.current.embedded_count, told.current.template_count) == ("projected", 30, 30)


def test_embeddings_must_name_their_recognizer_from_a_migration_on(kith: Kith, people: dict[str, bytes]) -> None:
    """Vectors of equal length need the recognizer's name too: a caller unaware of the migration keeps its own."""
    g = enrolled(kith, "twins", {"eileen": people["eileen"]}, keep_crops=True)
    first, second = (kith.embed(people["tom"], model=model) for model in (None, "twin"))
    ours, theirs = str(first.recognizer), str(second.recognizer)
    vectors = {str(each.recognizer): each.images[0].faces[0].embedding or [] for each in (first, second)}
    assert len(vectors[ours]) == len(vectors[theirs])

    def enroll(key: str, whose: str, **options: Any) -> int:
        options |= {"idempotency_key": key, "allow_inconsistent": True}
        return kith.enroll(g, "tom", embeddings=[vectors[whose]], **options).enrolled_count

    def check(answering: str, refused: str) -> None:
        for whose in (answering, refused):
            calls: tuple[Callable[..., object], ...] = (
                partial(kith.identify, g, embeddings=[vectors[whose]]),
                partial(kith.verify, vectors[whose], (g, "tom")),
                partial(kith.enroll, g, "x", embeddings=[vectors[whose]], allow_duplicate=True),
            )
            for call in calls:
                assert refusal(call)[1] == "recognizer_mismatch"
                if whose == answering:
                    call(recognizer=whose)
                else:
                    assert refusal(call, recognizer=whose)[1] == "recognizer_mismatch"

    assert enroll("before", ours) == 1
    assert kith.identify(g, embeddings=[vectors[ours]]).results[0].subject == "tom"
    assert moved(kith, g, "twin", force=True).state == "switched"
    # Repeated requests return the stored answer.
    assert enroll("before", ours) == enroll("after", theirs, recognizer=theirs) == 1
    check(theirs, ours)
    kith.roll_back(g)
    settled(kith, g)
    kith.finish_migration(g, force=True)
    settled(kith, g)
    check(ours, theirs)
    # Photos do not depend on a recognizer.
    assert kith.identify(g, people["eileen"], check_quality=False).results[0].subject == "eileen"


def test_no_crop_keeps_the_others_from_being_embedded(
    kith: Kith, settings: Settings, people: dict[str, bytes], darker: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged or imported crops fail alone, are reported, and wait."""
    file = io.BytesIO()
    Image.new("RGB", (112, 112)).save(file, "WEBP", lossless=True)
    black = file.getvalue()
    huge = black[:21] + b"\xff\xff\xff" + bytes([black[24] | 0x0F]) + black[25:]  # says that its sides are 16384
    embed = Recognizer.embed

    def none_of_black(self: Recognizer, faces: NDArray[np.uint8]) -> Float:
        if not faces.any(axis=(1, 2, 3)).all():
            raise ValueError("an embedding must be finite and must not be zero")
        return embed(self, faces)

    points = ((38, 51), (73, 51), (56, 71), (41, 92), (70, 92))
    g = enrolled(kith, "damages", people, keep_crops=True)
    with closing(open_database(settings.sql_url)) as database:
        seal = Store(database).galleries.get(g).seal
        damages = {
            "eileen": seal_crop(seal, Crop(huge, points)),
            "tom": seal_crop(seal, Crop(black, ((10**400, 1),) * 5)),
            "robin": seal_crop(seal, Crop(black, points)),
            "sam": b"RIFF",
        }
        damaged = {next(iter(kith.templates(g, subject))).id: sealed for subject, sealed in damages.items()}
        with database.write(StorageError("unforeseen")) as connection:
            for template, sealed in damaged.items():
                key = sa.select(templates.c.pk).where(templates.c.id == template).scalar_subquery()
                connection.execute(crops.update().where(crops.c.template_pk == key).values(sealed=sealed))
    kith.enroll(g, "eileen", darker)
    monkeypatch.setattr(Recognizer, "embed", none_of_black)
    (job,) = kith.migrate(g, "projected").jobs
    done = kith.wait_for(job, WAIT_S)
    assert (done.state, done.counts) == ("failed", {"embedded": 1, "image_damaged": 4})
    assert done.problem is not None and done.problem.code == "migration_incomplete"
    assert {item.item for item in kith.job_items(job, failed=True)} == damaged.keys()
    told = kith.migration(g)
    assert told.other is not None and (told.state, told.other.embedded_count) == ("stopped", 1)
    assert moved(kith, g, force=True).state == "switched"


def test_every_process_follows_at_once(kith: Kith, settings: Settings, people: dict[str, bytes], darker: bytes) -> None:
    alone = settings.model_copy(update={"extra_packs": None})
    g = enrolled(kith, "followed", {"eileen": people["eileen"]}, keep_crops=True)
    with embedded(settings) as second, Kith(second) as other, embedded(alone) as third, Kith(third) as single:
        # One that does not serve the new recognizer goes on until the switch.
        for one in (kith, other, single):
            assert one.identify(g, darker).model == "kith-compact"
        single.enroll(g, "tom", people["tom"])
        moved(kith, g)
        answer = other.identify(g, darker)
        assert (answer.model, answer.results[0].subject) == ("projected", "eileen")
        assert refusal(single.identify, g, darker)[1] == "recognizer_mismatch"
        # Its enrollment had a crop, and is found too.
        assert kith.migration(g).current.embedded_count == 2
        assert other.identify(g, people["tom"]).results[0].subject == "tom"
        other.roll_back(g)
        for one in (kith, other, single):
            assert one.identify(g, darker).model == "kith-compact"
