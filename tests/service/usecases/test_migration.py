"""A gallery migrates to another recognizer on a real server: preparation, cut-over and rollback."""

from __future__ import annotations

import io
import os
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
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.runtime.network import Float
from models.vision.recognition import Recognizer
from service.core.errors import StorageError
from service.domain.gallery import Crop
from service.server import embedded
from service.settings import load_settings
from service.storage.db.row_sealing import seal_crop
from service.storage.db.tables import crops, templates
from service.storage.repositories.generations import GenerationStore
from service.storage.repositories.store import Store
from tests.commands import run_kith
from tests.conftest import is_eventually, jpeg
from tests.databases import open_database
from tests.packs import PROJECTED, projected_pack
from tests.refusals import refusal
from tests.service.usecases.test_bulk_enrollment import Bytes, has_done, many

Photo = NDArray[np.uint8]
WAIT_S = 60


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    return projected_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def url(data_dir: Path, second: ModelPack) -> Iterator[str]:
    settings = load_settings(data_dir=data_dir, extra_packs=str(second.directory), log_level="WARNING")
    with embedded(settings) as served:
        yield served


@pytest.fixture
def both(url: str) -> Iterator[Kith]:
    with Kith(url) as kith:
        yield kith


@pytest.fixture(scope="module")
def people(group: Photo, astronaut: Photo, actor: Photo, url: str) -> dict[str, bytes]:
    """A photo of each of six people, one face in each."""
    cut = {"eileen": jpeg(astronaut), "tom": jpeg(actor)}
    with Kith(url) as kith:
        faces = kith.detect(jpeg(group, 98)).images[0].faces
    for i, face in enumerate(faces[:4]):
        x0, y0, x1, y1 = (int(v) for v in face.box)
        w, h = x1 - x0, y1 - y0
        cut[f"friend{i}"] = jpeg(group[max(0, y0 - h // 3) : y1 + h // 3, max(0, x0 - w // 3) : x1 + w // 3], 98)
    return cut


def darker(photo: bytes) -> bytes:
    """The same person in worse light."""
    with Image.open(io.BytesIO(photo)) as image:
        return jpeg((np.asarray(image)[:, ::-1] * 0.8).astype(np.uint8), 80)


def enrolled(kith: Kith, name: str, people: dict[str, bytes], **settings: Any) -> str:
    kith.create_gallery(name, risk={"fpir": 0.01}, **settings)
    for subject, photo in people.items():
        kith.enroll(name, subject, photo, face="largest", allow_low_quality=True, allow_duplicate=True)
    return name


def settled(kith: Kith, gallery: str) -> MigrationOut:
    """Return the state when its jobs have ended."""
    is_eventually(lambda: not kith.migration(gallery).jobs)
    return kith.migration(gallery)


def moved(kith: Kith, gallery: str, to: str = "projected", force: bool = False) -> MigrationOut:
    """Migrate to another recognizer, and return the state after the job."""
    kith.migrate(gallery, to, force)
    return settled(kith, gallery)


def test_the_whole_way_there_and_back(both: Kith, people: dict[str, bytes], second: ModelPack) -> None:
    g = enrolled(both, "whole", people, keep_crops=True)
    first, theirs = both.gallery(g).recognizer, second.recognition.fingerprint()
    told = both.migration(g)
    assert (told.state, told.without_crop_count) == ("none", 0)
    assert refusal(both.roll_back, g)[1] == "migration_state"
    assert both.finish_migration(g).state == "none"
    assert refusal(both.migrate, g, "none-such")[1] == "model_not_served"
    assert refusal(both.migrate, g, "kith-compact")[1] == "migration_state"

    told = moved(both, g)
    assert told.other is not None
    assert (told.state, told.current.recognizer, told.other.recognizer) == ("switched", theirs, first)
    assert (told.current.embedded_count, told.current.dimension) == (len(people), PROJECTED)
    assert (both.gallery(g).recognizer, both.gallery(g).dimension) == (theirs, PROJECTED)
    # The threshold comes from the new vectors, from the first answer on.
    assert told.current.threshold is not None and told.other.threshold is not None
    assert told.current.threshold.source == "both"
    assert told.current.threshold.threshold != told.other.threshold.threshold
    assert refusal(both.migrate, g, "kith-compact")[1] == "migration_state"  # a roll-back is another thing
    for subject, photo in people.items():
        answer = both.identify(g, photo, check_quality=False)
        assert (answer.model, answer.results[0].candidates[0].subject) == ("projected", subject)
        assert answer.results[0].similarity is not None and answer.results[0].similarity > 0.98

    both.delete_subject(g, "friend0")
    both.enroll(g, "friend0", people["friend0"], face="largest", allow_low_quality=True, allow_duplicate=True)
    back = both.roll_back(g)
    assert (back.state, back.current.recognizer) == ("stopped", first)
    assert both.roll_back(g).state == "stopped"
    back = settled(both, g)
    # What was enrolled after the switch is found by the recognizer before, too.
    assert back.current.embedded_count == back.current.template_count == len(people)
    assert both.identify(g, people["friend0"], check_quality=False).results[0].candidates[0].subject == "friend0"

    # There again, with what was made before, and for good. A bare similarity does not outlive its recognizer.
    assert moved(both, g).state == "switched"
    both.update_gallery(g, risk={"threshold": 0.7})
    assert refusal(both.roll_back, g)[1] == "migration_state"
    both.update_gallery(g, risk={"fpir": 0.01})
    done = both.finish_migration(g)
    assert (done.state, done.other) == ("none", None)
    assert both.finish_migration(g).state == "none"
    settled(both, g)
    assert both.identify(g, people["tom"], check_quality=False).results[0].candidates[0].subject == "tom"
    # Back to the first is a migration like any other.
    both.update_gallery(g, risk={"threshold": 0.7})
    assert refusal(both.migrate, g, "kith-compact")[1] == "migration_state"
    both.update_gallery(g, risk={"fpir": 0.01})
    assert moved(both, g, "kith-compact").current.embedded_count == len(people)
    events = [line.event.removeprefix("migration_") for line in both.audit(g) if line.event.startswith("migration")]
    there_and_back = ["started", "cut_over", "rolled_back"]
    assert events[::-1] == [*there_and_back, "started", "cut_over", "finished", "started", "cut_over"]


def test_templates_without_crops_are_listed_before_the_start(both: Kith, people: dict[str, bytes]) -> None:
    g = enrolled(both, "cropless", {"eileen": people["eileen"], "tom": people["tom"]})
    told = both.migration(g)
    ids = {(subject, one.id) for subject in ("eileen", "tom") for one in both.templates(g, subject)}
    assert (told.without_crop_count, {(one.subject, one.template) for one in told.without_crop}) == (2, ids)
    assert refusal(both.migrate, g, "projected")[1] == "migration_incomplete"
    assert both.migration(g).other is None
    both.update_gallery(g, keep_crops=True)
    both.enroll(g, "eileen", darker(people["eileen"]))
    told = moved(both, g, force=True)
    # Who is left out is said, and found by no search.
    assert (told.state, told.current.embedded_count, told.without_crop_count) == ("switched", 1, 2)
    assert both.identify(g, darker(people["eileen"])).results[0].subject == "eileen"
    assert both.identify(g, people["tom"]).results[0].outcome != "identified"
    assert refusal(both.finish_migration, g)[1] == "migration_incomplete"
    both.roll_back(g)
    assert both.identify(g, people["tom"]).results[0].subject == "tom"
    settled(both, g)
    both.enroll(g, "tom", darker(people["tom"]))
    assert both.migration(g).without_crop_count == 2
    both.finish_migration(g, force=True)


def test_what_is_enrolled_meanwhile_without_a_crop_stops_the_switch(
    both: Kith, people: dict[str, bytes], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = enrolled(both, "newcomers", {"eileen": people["eileen"]}, keep_crops=True)
    ours, switch = both.gallery(g), GenerationStore.switch

    def after_an_enrollment(self: GenerationStore, *arguments: Any) -> bool:
        if both.gallery(g).template_count == 1:
            both.enroll(g, "vector", embeddings=[rng.normal(size=ours.dimension)], recognizer=ours.recognizer)
        return switch(self, *arguments)

    monkeypatch.setattr(GenerationStore, "switch", after_an_enrollment)
    (job,) = both.migrate(g, "projected").jobs
    done = both.wait_for(job, WAIT_S)
    assert (done.state, done.problem and done.problem.code) == ("failed", "migration_incomplete")
    told = both.migration(g)
    assert (told.state, told.current.recognizer) == ("stopped", ours.recognizer)
    assert [one.subject for one in told.without_crop] == ["vector"]
    monkeypatch.undo()
    both.delete_subject(g, "vector")
    assert moved(both, g).state == "switched"


def test_an_archive_that_is_enrolled_meanwhile_goes_on_with_the_new_recognizer(
    both: Kith, people: dict[str, bytes], second: ModelPack
) -> None:
    g = enrolled(both, "moving", {}, keep_crops=True)
    job = both.enroll_archive(g, Bytes(many({f"{name}/1.jpg": people[name] for name in ("eileen", "tom")}, 30)))
    has_done(both, job, 5)
    both.migrate(g, "projected")
    ended = both.wait_for(job.id, WAIT_S)
    assert (ended.state, ended.counts) == ("succeeded", {"enrolled": 30})
    told = settled(both, g)
    assert (told.current.embedded_count, both.gallery(g).template_count) == (30, 30)
    assert both.gallery(g).recognizer == second.recognition.fingerprint()


def test_enrollments_during_switches_succeed(both: Kith, url: str, people: dict[str, bytes]) -> None:
    g = enrolled(both, "race", {"eileen": people["eileen"]}, keep_crops=True)
    stop, acknowledged, failures = threading.Event(), list[str](), list[Exception]()

    def enroll(writer: int) -> None:
        with Kith(url, attempts=1) as kith:
            for name in (f"w{writer}-{number}" for number in count()):
                try:
                    kith.enroll(g, name, people["tom"], allow_duplicate=True)
                    acknowledged.append(name)
                except Exception as error:
                    failures.append(error)
                if stop.is_set():
                    return

    def wait_for_enrollment() -> None:
        before = len(acknowledged) + len(failures)
        is_eventually(lambda: len(acknowledged) + len(failures) > before)

    writers = [threading.Thread(daemon=True, target=enroll, args=(w,)) for w in range(3)]
    for thread in writers:
        thread.start()
    for _ in range(3):
        wait_for_enrollment()
        assert moved(both, g).state == "switched", [both.job(one.id) for one in both.jobs(g)]
        wait_for_enrollment()
        both.roll_back(g)
    moved(both, g)
    stop.set()
    for thread in writers:
        thread.join()
    assert not failures
    told = both.migration(g)
    assert {s.id for s in both.subjects(g)} == {"eileen", *acknowledged}
    assert told.current.embedded_count == told.current.template_count == 1 + len(acknowledged)


def test_embeddings_must_name_their_recognizer_from_a_migration_on(tmp_path: Path, people: dict[str, bytes]) -> None:
    """Vectors of equal length need the recognizer's name too: a caller unaware of the migration keeps its own."""
    twin = projected_pack(tmp_path, "twin", load_pack(BUNDLED_PACK).recognition.dimension)
    settings = load_settings(data_dir=tmp_path / "data", extra_packs=str(twin.directory), log_level="WARNING")
    with embedded(settings) as url, Kith(url) as kith:
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
        assert kith.migration(g).state == "none"
        check(ours, theirs)
        # Photos do not depend on a recognizer.
        assert kith.identify(g, people["eileen"], check_quality=False).results[0].subject == "eileen"


def test_no_crop_keeps_the_others_from_being_embedded(
    both: Kith, data_dir: Path, people: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
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
    g = enrolled(both, "damages", people, keep_crops=True)
    with closing(open_database(f"sqlite:///{data_dir / 'kith.db'}")) as database:
        seal = Store(database).galleries.get(g).seal
        damages = {
            "eileen": seal_crop(seal, Crop(huge, points)),
            "tom": seal_crop(seal, Crop(black, ((10**400, 1),) * 5)),
            "friend0": seal_crop(seal, Crop(black, points)),
            "friend1": b"RIFF",
        }
        damaged = {next(iter(both.templates(g, subject))).id: sealed for subject, sealed in damages.items()}
        with database.write(StorageError("unforeseen")) as connection:
            for template, sealed in damaged.items():
                key = sa.select(templates.c.pk).where(templates.c.id == template).scalar_subquery()
                connection.execute(crops.update().where(crops.c.template_pk == key).values(sealed=sealed))
    monkeypatch.setattr(Recognizer, "embed", none_of_black)
    (job,) = both.migrate(g, "projected").jobs
    done = both.wait_for(job, WAIT_S)
    assert (done.state, done.counts) == ("failed", {"embedded": 2, "image_damaged": 4})
    assert done.problem is not None and done.problem.code == "migration_incomplete"
    assert {item.item for item in both.job_items(job, failed=True)} == damaged.keys()
    told = both.migration(g)
    assert told.other is not None and (told.state, told.other.embedded_count) == ("stopped", 2)
    assert moved(both, g, force=True).state == "switched"


def test_every_process_follows_at_once(
    url: str, both: Kith, data_dir: Path, second: ModelPack, people: dict[str, bytes]
) -> None:
    settings = load_settings(data_dir=data_dir, extra_packs=str(second.directory), log_level="WARNING")
    alone = load_settings(data_dir=data_dir, log_level="WARNING")
    g = enrolled(both, "followed", {"eileen": people["eileen"]}, keep_crops=True)
    photo = darker(people["eileen"])
    with embedded(settings) as other, Kith(other) as kith, embedded(alone) as third, Kith(third) as single:
        # One that does not serve the new recognizer goes on until the switch.
        for one in (both, kith, single):
            assert one.identify(g, photo).model == "kith-compact"
        single.enroll(g, "tom", people["tom"])
        moved(both, g)
        (found,) = kith.identify(g, photo).results
        assert (found.outcome, found.subject) == ("identified", "eileen")
        assert kith.identify(g, photo).model == "projected"
        assert refusal(single.identify, g, photo)[1] == "recognizer_mismatch"
        # Its enrollment had a crop, and is found too.
        assert settled(both, g).current.embedded_count == 2
        assert kith.identify(g, people["tom"]).results[0].subject == "tom"
        kith.roll_back(g)
        for one in (both, kith, single):
            assert one.identify(g, photo).model == "kith-compact"


def test_the_command(url: str, both: Kith, people: dict[str, bytes], tmp_path: Path) -> None:
    g = enrolled(both, "command", {"eileen": people["eileen"]}, keep_crops=True)
    ours = both.gallery(g)

    def kith(*arguments: str, status: int = 0) -> str:
        words = ("gallery", "migrate", g, *arguments, "--url", url)
        done = run_kith(*words, cwd=tmp_path, environment=os.environ)
        assert done.returncode == status, done.stderr
        return done.stdout

    assert "none" in kith()
    assert "switched" in (said := kith("--to", "projected")) and "1 of 1" in said
    assert MigrationOut.model_validate_json(kith("--json")).current.model == "projected"
    assert "stopped" in kith("--roll-back")
    assert "none" in kith("--finish")
    both.enroll(g, "tom", embeddings=[[1.0] * ours.dimension], recognizer=ours.recognizer)
    assert "tom" in kith("--status")
    assert "switched" in kith("--to", "projected", "--force")
    kith("--status", "--finish", status=2)
