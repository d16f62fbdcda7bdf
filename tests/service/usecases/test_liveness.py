"""People and pictures of them: what a gallery that requires liveness searches, compares and enrolls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from models.pack.minifasnet import write_minifasnet
from models.vision.liveness import LivenessResult
from service.risk.decision import refuse_presentation
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.store import Store
from tests.conftest import jpeg
from tests.databases import open_database
from tests.models.pack.test_minifasnet import small_network
from tests.packs import judging_pack
from tests.refusals import refusal
from tests.service.usecases.test_bulk_enrollment import Bytes, as_zip

Photo = NDArray[np.uint8]
MET: dict[str, Any] = {"risk": {"threshold": 0.4}}


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose pack takes reddish faces for people."""
    folder = tmp_path_factory.mktemp("liveness")
    pack = judging_pack(folder, threshold=0.6)
    with embedded(load_settings(data_dir=folder / "data", pack=pack.directory, log_level="ERROR")) as url:
        yield url


@pytest.fixture(scope="module")
def person(astronaut: Photo) -> bytes:
    return jpeg(astronaut)


@pytest.fixture(scope="module")
def picture(astronaut: Photo) -> bytes:
    """The same face, in blue."""
    return jpeg(np.ascontiguousarray(astronaut[:, :, ::-1]))


@pytest.fixture(scope="module")
def passport(astronaut: Photo) -> bytes:
    """The same face with nothing around it."""
    return jpeg(np.ascontiguousarray(astronaut[60:200, 165:290]))


@pytest.fixture(scope="module")
def vector(judging: str, person: bytes) -> list[float]:
    with Kith(judging) as kith:
        return kith.embed(person).images[0].faces[0].embedding or []


@pytest.fixture
def strict(judging: str, person: bytes) -> Iterator[Kith]:
    with Kith(judging) as kith:
        kith.create_gallery("strict", liveness="required")
        kith.enroll("strict", "eileen", person)
        yield kith
        kith.delete_gallery("strict")


@pytest.mark.parametrize(
    ("quality", "score", "expected"),
    [
        (["yaw"], 0.1, ("rejected_quality", ["yaw"])),
        ([], 0.59, ("rejected_liveness", ["not_live"])),
        ([], None, ("rejected_liveness", ["not_judged"])),
        ([], 0.6, (None, [])),
    ],
)
def test_quality_is_looked_at_before_liveness(quality: list[str], score: float | None, expected: object) -> None:
    assert refuse_presentation(quality, LivenessResult(score, 0.6).verdict()) == expected
    assert refuse_presentation(quality, None)[0] == ("rejected_quality" if quality else None)


def test_every_face_says_what_it_was_taken_for(
    judging: str, person: bytes, picture: bytes, passport: bytes, group: Photo
) -> None:
    with Kith(judging) as kith:
        for ask in (kith.detect, kith.embed):
            seen = [photo.faces[0].liveness for photo in ask(person, picture, passport).images]
            assert [one.verdict for one in seen if one] == ["live", "not_live", "not_judged"]
            scores = [one.score for one in seen if one and one.score is not None]
            assert len(scores) == 2
            assert scores[0] > 0.6 > scores[1]
        assert all(face.liveness for face in kith.detect(jpeg(group)).images[0].faces)
        (model,) = kith.model().models
        assert model.liveness is not None
        assert (model.liveness.file, model.liveness.precision) == ("liveness.onnx", "fp32")


def test_identification_searches_for_people_alone(
    strict: Kith, judging: str, person: bytes, picture: bytes, passport: bytes, vector: list[float]
) -> None:
    results = strict.identify("strict", person, picture, passport, **MET).results
    assert [(one.outcome, one.reasons) for one in results] == [
        ("identified", []),
        ("rejected_liveness", ["not_live"]),
        ("rejected_liveness", ["not_judged"]),
    ]
    assert [one.subject for one in results] == ["eileen", None, None]
    assert results[1].candidates == []
    (sent,) = strict.identify("strict", embeddings=[vector], **MET).results
    assert (sent.outcome, sent.reasons, sent.similarity) == ("rejected_liveness", ["not_judged"], None)

    strict.update_gallery("strict", liveness_threshold=0.0)
    lenient, unjudged = strict.identify("strict", picture, passport, **MET).results
    assert unjudged.outcome == "rejected_liveness"
    assert lenient.face is not None and lenient.face.liveness is not None
    assert lenient.face.liveness.verdict == "live"
    reset = httpx.patch(f"{judging}/v1/galleries/strict", json={"liveness_threshold": None}).json()
    assert (reset["liveness"], reset.get("liveness_threshold")) == ("required", None)
    assert strict.identify("strict", picture, **MET).results[0].outcome == "rejected_liveness"
    strict.update_gallery("strict", liveness="off")
    assert strict.identify("strict", person, **MET).results[0].outcome == "identified"
    assert "rejected_liveness" not in {one.outcome for one in strict.identify("strict", picture, passport).results}
    assert 'outcome="rejected_liveness"' in httpx.get(f"{judging}/metrics").text


def test_verification_compares_people_alone(
    strict: Kith, judging: str, person: bytes, picture: bytes, vector: list[float]
) -> None:
    enrolled = ("strict", "eileen")
    assert strict.verify(person, enrolled, risk={"threshold": 0.4}).outcome == "same"
    refused = strict.verify(picture, enrolled, risk={"threshold": 0.4})
    assert (refused.outcome, refused.reasons) == ("rejected_liveness", ["a: not_live"])
    # The request does not require liveness.
    assert strict.verify(person, picture, risk={"threshold": 0.4}).outcome in ("same", "different")
    assert strict.verify(enrolled, vector, risk={"threshold": 0.4}).outcome == "rejected_liveness"

    asking = {"request": json.dumps({"require_liveness": True})}
    asked = httpx.post(f"{judging}/v1/verify", data=asking, files={"a": person, "b": picture}).json()
    assert (asked["outcome"], asked["reasons"]) == ("rejected_liveness", ["b: not_live"])


def test_enrollment_takes_people_alone(strict: Kith, picture: bytes, passport: bytes, vector: list[float]) -> None:
    for photo, verdict in ((picture, "not_live"), (passport, "not_judged")):
        with pytest.raises(KithClientError) as refused:
            strict.enroll("strict", "other", photo)
        assert (refused.value.code, refused.value.problem["liveness"]["verdict"]) == ("not_live", verdict)
    assert refusal(strict.enroll, "strict", "other", embeddings=[vector], allow_duplicate=True)[1] == "not_live"
    options: dict[str, Any] = {"allow_duplicate": True, "allow_inconsistent": True, "allow_not_live": True}
    assert strict.enroll("strict", "other", picture, passport, embeddings=[vector], **options).enrolled_count == 3
    archive = Bytes(as_zip({"ada/1.jpg": picture}))
    for allowed, counts in ((False, {"not_live": 1}), (True, {"enrolled": 1})):
        job = strict.enroll_archive("strict", archive, allow_not_live=allowed, allow_duplicate=True)
        assert strict.wait_for(job.id).counts == counts


def test_a_gallery_that_asks_is_not_served_without_the_model(
    kith: Kith, gallery: str, settings: Settings, person: bytes
) -> None:
    """The gallery began with a pack that has the model."""
    assert kith.detect(person).images[0].faces[0].liveness is None
    kith.enroll(gallery, "eileen", person)
    with closing(open_database(settings.sql_url)) as database:
        Store(database).galleries.update(gallery, lambda now: replace(now, liveness="required"))
    calls: tuple[tuple[Any, ...], ...] = (
        (kith.identify, gallery, person),
        (kith.verify, person, (gallery, "eileen")),
        (kith.enroll, gallery, "eileen", person),
    )
    for call, *arguments in calls:
        assert refusal(call, *arguments) == (409, "liveness_unavailable")


def test_a_pulled_network_judges_faces_at_the_edge_too(tmp_path: Path, person: bytes, passport: bytes) -> None:
    network, files = tmp_path / "models" / "liveness" / "minifasnet", [tmp_path / "0.onnx", tmp_path / "1.onnx"]
    network.mkdir(parents=True)
    for seed, file in enumerate(files):
        file.write_bytes(small_network(seed))
    write_minifasnet(network, files)
    settings = load_settings(data_dir=tmp_path / "data", models_dir=tmp_path / "models", log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        for photo in kith.detect(person, passport).images:
            judged = photo.faces[0].liveness
            assert judged is not None and judged.verdict != "not_judged"
        kith.create_gallery("strict", liveness="required", liveness_threshold=1.0)
        assert refusal(kith.enroll, "strict", "eileen", person)[1] == "not_live"
