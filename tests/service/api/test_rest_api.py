"""REST API of a real server with real photos."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import cv2
import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy.exc
from numpy.typing import NDArray

from kith import Kith, KithClientError, Risk
from models.errors import ModelError
from service.api.http.access import Authenticator, needs_of
from service.api.routes import transfer
from service.app import create_app
from service.core.errors import StorageFullError
from service.inference import photo_pipeline
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.galleries import GalleryStore
from tests.conftest import jpeg
from tests.service.api.conftest import KEY, ORIGIN, Guarded

Photo = NDArray[np.uint8]


def darker(photo: Photo) -> bytes:
    """The same subjects, mirrored and in worse light."""
    return jpeg((photo[:, ::-1] * 0.75).astype(np.uint8), 60)


def in_the_dark(photo: Photo) -> bytes:
    """The face and little beside it, in hardly any light."""
    return jpeg((photo[:256, 96:352] * 0.12).astype(np.uint8))


def test_a_model_states_what_it_misses(kith: Kith) -> None:
    assert kith.ready().status == "ok"
    assert kith.model().calibrated and kith.model().recognition.providers
    usual = kith.model().misses
    assert [found.fpir for found in usual] == [0.0001, 0.001, 0.01]
    (relaxed,) = kith.model(0.02).misses
    assert (relaxed.fpir, relaxed.subject_count) == (0.02, 100)
    assert 0 < relaxed.fnir < usual[2].fnir
    assert relaxed.better is not None
    assert relaxed.better.fnir < relaxed.fnir
    with pytest.raises(KithClientError) as error:
        kith.model(1.5)
    assert error.value.code == "invalid_request"


def test_of_too_many_faces_the_largest_are_kept_and_the_answers_say_so(
    kith: Kith, tmp_path: Path, group: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = kith.detect(jpeg(group)).images[0]
    assert (everyone.face_count, everyone.truncated) == (6, False)
    by_size = sorted(everyone.faces, key=lambda face: (face.box[2] - face.box[0]) * (face.box[3] - face.box[1]))
    largest = [pytest.approx(face.box, abs=2) for face in sorted(by_size[-2:], key=lambda face: face.box[0])]
    monkeypatch.setattr(photo_pipeline, "MAX_FACES", 2)
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING")) as url, Kith(url) as few:
        few.create_gallery("g")
        for answer in (few.detect(jpeg(group)).images, few.embed(jpeg(group)).images):
            assert [(photo.face_count, photo.truncated) for photo in answer] == [(6, True)]
            assert sorted(face.box for face in answer[0].faces) == largest
        found = few.identify("g", jpeg(group), b"no photo", check_quality=False)
        assert [(photo.face_count, photo.truncated) for photo in found.images] == [(6, True), (None, None)]
        assert sorted(result.face.box for result in found.results if result.face) == largest
        alone = few.identify("g", jpeg(group), faces="largest", check_quality=False)
        assert [(photo.face_count, photo.truncated) for photo in alone.images] == [(6, False)]
        assert alone.results[0].face is not None
        assert alone.results[0].face.box == pytest.approx(by_size[-1].box, abs=2)
        assert few.verify(jpeg(group), jpeg(group)).a.face_count == 6
        assert few.enroll("g", "someone", jpeg(group), face="largest").results[0].face_count == 6


def test_verify_photos_embeddings_and_subjects(kith: Kith, gallery: str, astronaut: Photo, actor: Photo) -> None:
    same = kith.verify(jpeg(astronaut), darker(astronaut), risk={"fmr": 0.001})
    assert same.outcome == "same"
    assert same.false_match_probability is not None
    assert same.false_match_probability < 0.001
    assert same.risk is not None
    assert (same.risk.fmr, same.risk.source) == (0.001, "pack")
    assert kith.verify(jpeg(astronaut), jpeg(actor)).outcome == "different"
    vector = kith.embed(darker(astronaut)).images[0].faces[0].embedding
    assert vector is not None
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    assert kith.verify(vector, (gallery, "eileen")).outcome == "same"
    assert kith.verify((gallery, "eileen"), jpeg(actor)).outcome == "different"


def test_enroll_identify_delete(kith: Kith, gallery: str, astronaut: Photo, actor: Photo, group: Photo) -> None:
    kith.put_subject(gallery, "eileen", name="Eileen Collins", metadata={"crew": "STS-93"}, tags=["nasa"])
    enrolled = kith.enroll(gallery, "eileen", jpeg(astronaut))
    assert enrolled.enrolled_count == 1
    (found,) = kith.identify(gallery, darker(astronaut)).results
    assert (found.outcome, found.subject, found.name) == ("identified", "eileen", "Eileen Collins")
    assert found.similarity is not None
    assert found.threshold is not None
    assert found.similarity >= found.threshold > (found.review_threshold or 0)
    assert found.false_alarm_probability is not None
    assert found.false_alarm_probability < 0.001
    strangers = kith.identify(gallery, jpeg(group), risk={"fpir": 0.001}).results
    assert {s.outcome for s in strangers} <= {"unknown", "rejected_quality"}
    assert all(s.subject is None for s in strangers)
    # An unknown result still has the best candidate.
    assert any(s.candidates and s.candidates[0].subject == "eileen" for s in strangers)
    assert kith.delete_subject(gallery, "eileen").template_count == 1
    (gone,) = kith.identify(gallery, darker(astronaut)).results
    assert (gone.outcome, gone.candidates) == ("unknown", [])


def test_the_threshold_follows_risk_and_size(kith: Kith, gallery: str, rng: np.random.Generator) -> None:
    d = kith.model().dimension
    vectors = rng.normal(size=(40, d))
    kith.enroll(gallery, "first", embeddings=[vectors[0]])

    def threshold(**risk: Unpack[Risk]) -> float:
        (result,) = kith.identify(gallery, embeddings=[vectors[0]], risk=risk).results
        assert result.threshold is not None
        return result.threshold

    alone = threshold(fpir=0.001)
    assert threshold(fpir=0.01) < alone < threshold(fpir=0.0001)
    assert threshold(preset="standard") == alone
    assert threshold(threshold=0.3) == 0.3
    (impossible,) = kith.identify(gallery, embeddings=[vectors[0]], risk={"fpir": 1e-12}).results
    assert (impossible.outcome, impossible.reasons) == ("unknown", ["risk_out_of_reach"])
    kith.enroll(gallery, "first", embeddings=[vectors[0]] * 3)
    assert threshold(fpir=0.001) == alone
    for i, vector in enumerate(vectors[1:]):
        kith.enroll(gallery, f"other{i}", embeddings=[vector], allow_duplicate=True)  # these are no faces
    kith.calibrate(gallery)
    assert threshold(fpir=0.01) < threshold(fpir=0.001) < threshold(fpir=0.0001)
    assert threshold(fmr=0.0001) > threshold(fmr=0.001)


def test_enrollment_rejects_unsuitable_photos(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo, group: Photo, nobody: Photo
) -> None:
    def code(subject: str, photo: bytes, **options: Any) -> str:
        with pytest.raises(KithClientError) as raised:
            kith.enroll(gallery, subject, photo, **options)
        return raised.value.code

    assert code("x", jpeg(nobody)) == "no_face"
    assert code("x", jpeg(group)) == "several_faces"
    assert code("x", in_the_dark(astronaut)) == "low_quality"
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    with pytest.raises(KithClientError) as raised:
        kith.enroll(gallery, "x", darker(astronaut))
    assert raised.value.code == "duplicate_subject"
    assert raised.value.problem["subject"] == "eileen"
    assert code("eileen", jpeg(actor)) == "inconsistent_template"
    assert kith.gallery(gallery).template_count == 1
    kith.enroll(gallery, "x", darker(astronaut), allow_duplicate=True)
    kith.enroll(gallery, "eileen", jpeg(actor), allow_inconsistent=True)
    kith.enroll(gallery, "y", jpeg(group), face="largest")
    assert kith.gallery(gallery).template_count == 4


def beside(photo: Photo, other: Photo, share: float, blur: float = 0.0) -> bytes:
    """Both photos of people with faces of equal size, the other one at a share of its size, and blurred."""
    one, two = photo[:300, 90:360], cv2.resize(other, None, fx=share, fy=share, interpolation=cv2.INTER_AREA)
    canvas = np.full((max(300, two.shape[0]), 270 + two.shape[1], 3), 120, np.uint8)
    canvas[:300, :270] = one
    canvas[: two.shape[0], 270:] = cv2.GaussianBlur(two, (0, 0), blur) if blur else two
    return jpeg(canvas)


def test_a_bystander_does_not_cost_a_person_the_photo(kith: Kith, astronaut: Photo, actor: Photo) -> None:
    """The larger and sharper face is enrolled, whoever it is and where it is; of two alike, none."""
    (a,), (b,) = (kith.detect(jpeg(photo)).images[0].faces for photo in (astronaut, actor))
    equal = (a.box[2] - a.box[0]) / (b.box[2] - b.box[0])
    kith.create_gallery("bystanders", keep_crops=True)
    kith.create_gallery("known")
    kith.enroll("known", "eileen", jpeg(astronaut))
    kith.enroll("known", "tom", jpeg(actor))
    for number, (share, blur, owner) in enumerate(
        [
            (0.5, 0, "eileen"),
            (0.3, 0, "eileen"),
            (2, 0, "tom"),
            (1, 12, "eileen"),
            (1.2, 12, "eileen"),
            (0.6, 2, "eileen"),
        ]
    ):
        photo = beside(astronaut, actor, share * equal, blur)
        enrolled = kith.enroll("bystanders", f"{owner}{number}", photo, allow_duplicate=True)
        (result,) = enrolled.results
        assert result.face is not None and result.template is not None
        assert result.face_count == len(kith.detect(photo, detail="medium").images[0].faces)
        (crop,) = kith.crops("bystanders", [{"subject": f"{owner}{number}"}])
        assert crop is not None
        assert kith.identify("known", crop, faces="largest").results[0].subject == owner
        kept = kith.verify(photo, ("known", owner))
        assert (kept.outcome, kept.a.face_count) == ("same", result.face_count)
    for share in (0.85, 1.0, 1.15):
        photo = beside(astronaut, astronaut[:300, 360:90:-1], share)
        with pytest.raises(KithClientError) as refused:
            kith.enroll("bystanders", "nobody", photo, allow_duplicate=True)
        assert refused.value.code == "several_faces"
        assert kith.enroll("bystanders", "anyone", photo, face="largest", allow_duplicate=True).enrolled_count == 1


def test_each_of_several_photos_is_enrolled_or_rejected_separately(
    kith: Kith, gallery: str, astronaut: Photo, nobody: Photo
) -> None:
    answer = kith.enroll(gallery, "eileen", jpeg(astronaut), jpeg(nobody), b"text", darker(astronaut))
    codes = [r.error.code if r.error else None for r in answer.results]
    assert codes == [None, "no_face", "image_format", None]
    listed = list(kith.templates(gallery, "eileen"))
    assert [t.id for t in listed] == [r.template for r in answer.results if r.template]
    kith.delete_template(gallery, "eileen", listed[0].id)
    assert kith.subject(gallery, "eileen").template_count == 1


def test_a_repeated_idempotency_key_returns_the_first_response(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo
) -> None:
    first = kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one")
    again = kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one")
    assert first == again
    assert kith.gallery(gallery).template_count == 1
    with pytest.raises(KithClientError) as raised:
        kith.enroll(gallery, "eileen", jpeg(actor), idempotency_key="one")
    assert raised.value.code == "idempotency_conflict"


def test_a_stored_response_names_no_other_subject(kith: Kith, gallery: str, astronaut: Photo, actor: Photo) -> None:
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    photos = jpeg(actor), darker(astronaut)
    first, again = (kith.enroll(gallery, "tom", *photos, idempotency_key="one") for _ in range(2))
    assert [r.template for r in first.results] == [r.template for r in again.results]
    said, kept = (answer.results[1].error for answer in (first, again))
    assert said is not None
    assert kept is not None
    assert said.code == kept.code == "duplicate_subject"
    assert "eileen" in said.detail
    assert "eileen" not in str(kept)


def test_deleting_a_subject_deletes_its_idempotency_keys(kith: Kith, gallery: str, astronaut: Photo) -> None:
    """Otherwise a repeated enrollment after a deletion would get the old response."""
    first = kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one")
    kith.delete_subject(gallery, "eileen")
    again = kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one")
    assert again.results[0].template != first.results[0].template
    assert kith.gallery(gallery).template_count == 1


def test_photos_of_one_request_are_compared_with_each_other(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo
) -> None:
    answer = kith.enroll(gallery, "eileen", jpeg(astronaut), jpeg(actor))
    assert [r.error.code if r.error else None for r in answer.results] == [None, "inconsistent_template"]


def test_gallery_settings(kith: Kith, gallery: str) -> None:
    changed = kith.update_gallery(gallery, risk={"fpir": 0.01})
    assert changed.risk == {"fpir": 0.01}
    kith.update_gallery(gallery, quality_gate={"min_eye_distance_px": 40})
    assert kith.update_gallery(gallery, quality_gate={"min_sharpness": 5.0}).risk == {"fpir": 0.01}
    gate = kith.gallery(gallery).quality_gate
    assert (gate.min_sharpness, gate.min_eye_distance_px) == (5.0, 40)


def test_subjects_are_paged_patched_and_have_free_names(kith: Kith, gallery: str, server: str) -> None:
    names = [f"s{i:03}" for i in range(120)] + ["Zoë (kitchen)", "渡辺"]
    for name in names:
        kith.put_subject(gallery, name)
    assert [s.id for s in kith.subjects(gallery)] == names
    url = f"{server}/v1/galleries/{gallery}/subjects/s000"
    patched = httpx.patch(url, json={"tags": ["a"]}).json()
    assert patched["tags"] == ["a"]
    assert httpx.patch(url, json={"name": "N"}).json()["tags"] == ["a"]


def test_head_runs_no_handler_that_reads_data(kith: Kith, server: str) -> None:
    """HEAD returns the headers of GET without a body (RFC 9110, 9.3.2) where no key is needed, and 405 elsewhere."""
    every = needs_of(create_app(load_settings(_env_file=None)).routes)
    needs = {route.removeprefix("GET "): need for route, need in every.items() if route.startswith("GET ")}
    keyless = {path for path, need in needs.items() if need is None}
    assert {"/healthz", "/readyz", "/console", "/docs"} <= keyless
    assert not any(path.startswith("/v1") for path in keyless)
    kith.create_gallery("untouched")
    before = [line.event for line in kith.audit()]
    with httpx.Client(base_url=server) as client:
        for path in [*(path for path in keyless if "{" not in path), "/console/main.js", "/console/absent", "/nowhere"]:
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers.get("content-type") == get.headers.get("content-type"), path
        assert client.head("/healthz").headers["content-length"] == client.get("/healthz").headers["content-length"]
        for path in needs.keys() - keyless:
            refused = client.head(re.sub("{[a-z]+}", "untouched", path))
            assert (refused.status_code, refused.content) == (405, b""), path
            assert "GET" in refused.headers["allow"].split(", ")
            assert "HEAD" not in refused.headers["allow"].split(", ")
        assert client.head("/v1/detect").headers["allow"] == "POST"
    assert [line.event for line in kith.audit()] == before
    kith.delete_gallery("untouched")


def test_an_api_key_is_required(stranger: httpx.Client) -> None:
    assert stranger.get("/healthz").status_code == 200
    refused = stranger.get("/v1/galleries")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert refused.headers["x-request-id"] == refused.json()["request_id"]
    assert stranger.get("/v1/galleries", headers={"X-API-Key": "secret"}).status_code == 401
    assert stranger.head("/v1/galleries").status_code == 401
    assert stranger.get("/v1/galleries", headers={"X-API-Key": KEY}).status_code == 200


def test_a_gallery_survives_a_restart_and_keeps_its_recognizer(
    settings: Settings, tmp_path: Path, reference: Path, astronaut: Photo
) -> None:
    own = load_settings(data_dir=tmp_path, log_level="WARNING")
    with embedded(own) as url, Kith(url) as kith:
        kith.create_gallery("staff")
        kith.enroll("staff", "eileen", jpeg(astronaut))
    with embedded(own) as url, Kith(url) as kith:
        (found,) = kith.identify("staff", darker(astronaut)).results
        assert found.subject == "eileen"
    with embedded(load_settings(data_dir=tmp_path, pack=reference, log_level="WARNING")) as url, Kith(url) as kith:
        with pytest.raises(KithClientError) as raised:
            kith.identify("staff", darker(astronaut))
        assert raised.value.code == "recognizer_mismatch"
        # Without calibration, explicit thresholds work and risks are rejected.
        kith.create_gallery("other", risk={"threshold": 0.4})
        kith.enroll("other", "eileen", jpeg(astronaut))
        assert kith.identify("other", darker(astronaut)).results[0].subject == "eileen"
        with pytest.raises(KithClientError) as raised:
            kith.identify("other", darker(astronaut), risk={"fpir": 0.01})
        assert raised.value.code == "risk_uncalibrated"


def test_if_none_match_does_not_change_an_existing_subject(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo
) -> None:
    assert kith.put_subject(gallery, "ada", name="Ada", tags=["vip"], only_new=True).name == "Ada"
    calls: list[Callable[[], object]] = [
        lambda: kith.put_subject(gallery, "ada", only_new=True),
        lambda: kith.enroll(gallery, "ada", jpeg(actor), only_new=True),
    ]
    for call in calls:
        with pytest.raises(KithClientError) as raised:
            call()
        assert (raised.value.status, raised.value.code) == (412, "subject_exists")
    ada = kith.subject(gallery, "ada")
    assert (ada.name, ada.tags, ada.template_count) == ("Ada", ["vip"], 0)

    for _ in range(2):  # a retry gets the first response, not a conflict with itself
        kith.enroll(gallery, "tom", jpeg(actor), only_new=True, idempotency_key="one")
    assert kith.subject(gallery, "tom").template_count == 1
    kith.delete_subject(gallery, "ada")
    assert kith.enroll(gallery, "ada", jpeg(astronaut), only_new=True).enrolled_count == 1


def test_one_of_many_concurrent_requests_creates_a_subject(kith: Kith, gallery: str, rng: np.random.Generator) -> None:
    vector = rng.normal(size=kith.model().dimension).astype(np.float32)

    def make(_: int) -> str:
        try:
            kith.enroll(gallery, "ada", embeddings=[vector], only_new=True)
        except KithClientError as error:
            return error.code
        return "made"

    with ThreadPoolExecutor(8) as desks:
        became = list(desks.map(make, range(8)))
    assert sorted(became) == ["made", *["subject_exists"] * 7]
    assert kith.subject(gallery, "ada").template_count == 1


def test_a_concurrent_retry_does_not_conflict_with_its_first_attempt(
    kith: Kith, gallery: str, rng: np.random.Generator
) -> None:
    vectors = rng.normal(size=(5, kith.model().dimension)).astype(np.float32)
    for number, vector in enumerate(vectors):

        def ask(_: int, subject: str = f"s{number}", given: NDArray[np.float32] = vector) -> str | None:
            answer = kith.enroll(gallery, subject, embeddings=[given], only_new=True, idempotency_key=f"key-{subject}")
            return answer.results[0].template

        with ThreadPoolExecutor(8) as sendings:
            assert len(set(sendings.map(ask, range(8)))) == 1
        assert kith.subject(gallery, f"s{number}").template_count == 1


@contextmanager
def counted_problems(url: str, expected: dict[str, int]) -> Iterator[None]:
    """Check which problems the server counts within the block."""

    def counts() -> Counter[str]:
        text = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}).text
        return Counter({code: int(float(n)) for code, n in re.findall(r'kith_problems_total{code="(\w+)"} (.+)', text)})

    before = counts()
    yield
    assert counts() - before == expected


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("handler", RuntimeError("unforeseen")),
        ("handler", sqlalchemy.exc.InvalidRequestError("unforeseen")),
        ("gate", RuntimeError("unforeseen")),
        ("handler", ModelError("unforeseen")),
    ],
)
def test_an_unexpected_error_is_answered_counted_and_logged_once(
    guarded: Guarded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with caplog.at_level(logging.INFO), counted_problems(guarded.url, {"internal": 1}), monkeypatch.context() as patch:
        if place == "gate":
            patch.setattr(Authenticator, "authenticate", fail)
        else:
            patch.setattr(GalleryStore, "list_page", fail)
        answer = httpx.get(f"{guarded.url}/v1/galleries", headers={"Origin": ORIGIN, "X-API-Key": KEY})
        patch.undo()
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "unforeseen" not in answer.text
    traced = [record for record in caplog.records if record.exc_info is not None]
    assert [record.getMessage() for record in traced] == [f"request {answer.headers['x-request-id']} failed"]
    assert not [record for record in caplog.records if "ASGI" in record.getMessage()]
    logged = [record for record in caplog.records if record.name == "service.access" and "fields" in vars(record)]
    assert [vars(each)["fields"]["code"] for each in logged if each.args[3] == 500] == ["internal"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("unforeseen"), "internal"), (StorageFullError("full"), "storage_full")]
)
def test_an_error_in_a_stream_cuts_it_and_is_counted(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    def pieces(*_: object) -> Iterator[bytes]:
        yield b"{}\n" * 100
        raise error

    monkeypatch.setattr(transfer, "export", pieces)
    with Kith(guarded.url, KEY) as kith:
        kith.create_gallery(code)
        with (
            counted_problems(guarded.url, {code: 1}),
            caplog.at_level(logging.INFO),
            pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
        ):
            httpx.get(f"{guarded.url}/v1/galleries/{code}/export", headers={"X-API-Key": KEY})
    traced = [record for record in caplog.records if record.exc_info is not None]
    assert len(traced) == 1
    assert "its response is incomplete" in traced[0].getMessage()


def test_unknown_paths_and_methods_are_counted(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    expected = ["not_found", "not_found", "method_not_allowed", "request_too_large"]
    with (
        caplog.at_level(logging.INFO),
        counted_problems(guarded.url, Counter(expected)),
        httpx.Client(base_url=guarded.url, headers={"X-API-Key": KEY}) as http,
    ):
        for method, path in (("GET", "/nowhere"), ("GET", "/console/absent"), ("PUT", "/v1/galleries")):
            assert "x-request-id" in http.request(method, path).headers
        http.post("/v1/galleries", content=b"x" * 2_000_000)
    codes = [vars(record)["fields"]["code"] for record in caplog.records if record.name == "service.access"]
    assert [code for code in codes if code] == expected


def test_content_types_of_json_are_accepted(server: str, kith: Kith) -> None:
    for number, kind in enumerate(
        ("application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json")
    ):
        body = json.dumps({"name": f"typed{number}"}).encode()
        answer = httpx.post(f"{server}/v1/galleries", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 201, kind
        kith.delete_gallery(f"typed{number}")
