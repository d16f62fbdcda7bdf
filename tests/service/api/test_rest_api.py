"""REST API of a real server with real photos."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy.exc
from numpy.typing import NDArray

from kith import Kith, Risk
from service.api.http.access import Authenticator
from service.api.routes import transfer
from service.core.errors import StorageFullError
from service.inference import photo_pipeline
from service.server import embedded
from service.settings import load_settings
from service.storage.repositories.galleries import GalleryStore
from tests.conftest import jpeg
from tests.refusals import check, refusal
from tests.service.api.conftest import KEY, ORIGIN, Guarded

Photo = NDArray[np.uint8]


def darker(photo: Photo) -> bytes:
    """The same subjects, mirrored and in worse light."""
    return jpeg((photo[:, ::-1] * 0.75).astype(np.uint8), 60)


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
    assert refusal(kith.model, 1.5) == (422, "invalid_request")


def test_of_too_many_faces_the_largest_are_kept_and_the_answers_say_so(
    kith: Kith, gallery: str, group: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = jpeg(group)
    everyone = kith.detect(photo).images[0]
    assert (everyone.face_count, everyone.truncated) == (6, False)
    by_size = sorted(everyone.faces, key=lambda face: (face.box[2] - face.box[0]) * (face.box[3] - face.box[1]))
    largest = sorted(face.box for face in by_size[-2:])
    monkeypatch.setattr(photo_pipeline, "MAX_FACES", 2)
    for answer in (kith.detect(photo).images, kith.embed(photo).images):
        assert [(each.face_count, each.truncated) for each in answer] == [(6, True)]
        assert sorted(face.box for face in answer[0].faces) == largest
    found = kith.identify(gallery, photo, b"no photo", check_quality=False)
    assert [(each.face_count, each.truncated) for each in found.images] == [(6, True), (None, None)]
    assert sorted(result.face.box for result in found.results if result.face) == largest
    alone = kith.identify(gallery, photo, faces="largest", check_quality=False)
    assert [(each.face_count, each.truncated) for each in alone.images] == [(6, False)]
    assert alone.results[0].face is not None and alone.results[0].face.box == by_size[-1].box
    assert kith.verify(photo, photo).a.face_count == 6
    assert kith.enroll(gallery, "someone", photo, face="largest").results[0].face_count == 6


def test_enroll_identify_verify_delete(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo, group: Photo, nobody: Photo
) -> None:
    about: dict[str, Any] = {"name": "Eileen Collins", "metadata": {"crew": "STS-93"}, "tags": ["nasa"]}
    kith.put_subject(gallery, "eileen", **about, only_new=True)
    answer = kith.enroll(gallery, "eileen", jpeg(astronaut), jpeg(nobody), b"text", darker(astronaut), jpeg(actor))
    codes = [r.error.code if r.error else None for r in answer.results]
    assert codes == [None, "no_face", "image_format", None, "inconsistent_template"]
    listed = list(kith.templates(gallery, "eileen"))
    assert [t.id for t in listed] == [r.template for r in answer.results if r.template]
    for change, *photos in ((kith.put_subject,), (kith.enroll, jpeg(actor))):  # whatever else the photo is refused for
        assert refusal(change, gallery, "eileen", *photos, only_new=True) == (412, "subject_exists")
    kith.delete_template(gallery, "eileen", listed[1].id)
    assert kith.subject(gallery, "eileen").template_count == 1
    (found,) = kith.identify(gallery, darker(astronaut)).results
    assert (found.outcome, found.subject, found.name) == ("identified", "eileen", "Eileen Collins")
    assert found.similarity is not None and found.threshold is not None
    assert found.similarity >= found.threshold > (found.review_threshold or 0)
    assert found.false_alarm_probability is not None and found.false_alarm_probability < 0.001
    strangers = kith.identify(gallery, jpeg(group), risk={"fpir": 0.001}).results
    assert {(s.outcome, s.subject) for s in strangers} <= {("unknown", None), ("rejected_quality", None)}
    # An unknown result still has the best candidate.
    assert any(s.candidates and s.candidates[0].subject == "eileen" for s in strangers)

    same = kith.verify(jpeg(astronaut), darker(astronaut), risk={"fmr": 0.001})
    assert (same.outcome, same.risk and (same.risk.fmr, same.risk.source)) == ("same", (0.001, "pack"))
    assert same.false_match_probability is not None and same.false_match_probability < 0.001
    assert kith.verify((gallery, "eileen"), jpeg(actor)).outcome == "different"
    assert kith.delete_subject(gallery, "eileen").template_count == 1
    (gone,) = kith.identify(gallery, darker(astronaut)).results
    assert (gone.outcome, gone.candidates) == ("unknown", [])


def test_the_threshold_follows_the_risk(kith: Kith, gallery: str) -> None:
    vector = np.eye(kith.model().dimension)[0]
    kith.enroll(gallery, "ada", embeddings=[vector])

    def threshold(**risk: Unpack[Risk]) -> float:
        return kith.identify(gallery, embeddings=[vector], risk=risk).results[0].threshold or 0

    alone = threshold(fpir=0.001)
    assert threshold(fpir=0.01) < alone < threshold(fpir=0.0001)
    assert threshold(fmr=0.001) < threshold(fmr=0.0001)
    assert (threshold(preset="standard"), threshold(threshold=0.3)) == (alone, 0.3)
    (impossible,) = kith.identify(gallery, embeddings=[vector], risk={"fpir": 1e-12}).results
    assert (impossible.outcome, impossible.reasons) == ("unknown", ["risk_out_of_reach"])


def test_a_repeated_idempotency_key_returns_the_first_response(
    kith: Kith, gallery: str, astronaut: Photo, actor: Photo
) -> None:
    first, again = (kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one") for _ in range(2))
    assert first == again
    assert kith.gallery(gallery).template_count == 1
    assert refusal(kith.enroll, gallery, "eileen", jpeg(actor), idempotency_key="one")[1] == "idempotency_conflict"
    # A stored response names no other subject and no similarity: any key that repeats the request gets it.
    photos = jpeg(actor), darker(astronaut)
    toms = [kith.enroll(gallery, "tom", *photos, idempotency_key="two").results[1].error for _ in range(2)]
    told = [(error.code, "eileen" in str(error), "similarity" in error.model_dump()) for error in toms if error]
    assert told == [("duplicate_subject", True, True), ("duplicate_subject", False, False)]
    # A deletion of the subject deletes its keys: a repeated enrollment would get the old response.
    kith.delete_subject(gallery, "eileen")
    anew = kith.enroll(gallery, "eileen", jpeg(astronaut), idempotency_key="one", allow_duplicate=True)
    assert anew.results[0].template != first.results[0].template
    assert kith.subject(gallery, "eileen").template_count == 1


def test_changes_keep_what_they_do_not_name(kith: Kith, gallery: str) -> None:
    kith.update_gallery(gallery, risk={"fpir": 0.01})
    kith.update_gallery(gallery, quality_gate={"min_eye_distance_px": 40})
    assert kith.update_gallery(gallery, quality_gate={"min_sharpness": 5.0}).risk == {"fpir": 0.01}
    gate = kith.gallery(gallery).quality_gate
    assert (gate.min_sharpness, gate.min_eye_distance_px) == (5.0, 40)


def test_head_answers_as_get_without_a_body(server: str) -> None:
    """Where no key is needed (RFC 9110, 9.3.2). Elsewhere it would run a handler that reads data."""
    with httpx.Client(base_url=server) as client:
        for path in (
            "/healthz",
            "/readyz",
            "/",
            "/console",
            "/console/main.js",
            "/console/absent",
            "/docs",
            "/nowhere",
        ):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers.get("content-type") == get.headers.get("content-type"), path
        assert client.head("/healthz").headers["content-length"] == client.get("/healthz").headers["content-length"]
        assert client.head("/v1/galleries").status_code == 405


def test_without_a_calibration_thresholds_work_and_risks_are_refused(
    tmp_path: Path, reference: Path, astronaut: Photo
) -> None:
    with embedded(load_settings(data_dir=tmp_path, pack=reference, log_level="WARNING")) as url, Kith(url) as kith:
        kith.create_gallery("g", risk={"threshold": 0.4})
        kith.enroll("g", "eileen", jpeg(astronaut))
        assert kith.identify("g", darker(astronaut)).results[0].subject == "eileen"
        assert refusal(kith.identify, "g", darker(astronaut), risk={"fpir": 0.01})[1] == "risk_uncalibrated"


@contextmanager
def counted_problems(url: str, expected: dict[str, int]) -> Iterator[None]:
    """Check which problems the server counts within the block."""

    def counts() -> Counter[str]:
        text = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}).text
        return Counter({code: int(float(n)) for code, n in re.findall(r'kith_problems_total{code="(\w+)"} (.+)', text)})

    before = counts()
    yield
    assert counts() - before == expected


@pytest.mark.parametrize(("owner", "name"), [(GalleryStore, "list_page"), (Authenticator, "authenticate")])
def test_an_unexpected_error_is_answered_counted_and_logged_once(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: object, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise sqlalchemy.exc.InvalidRequestError("unforeseen")

    with caplog.at_level(logging.INFO), counted_problems(guarded.url, {"internal": 1}), monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        answer = httpx.get(f"{guarded.url}/v1/galleries", headers={"Origin": ORIGIN, "X-API-Key": KEY})
        patch.undo()
    problem = check(answer, 500, "internal")
    assert answer.headers["x-request-id"] == problem["request_id"]
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


def test_content_types_of_json_are_accepted(server: str, gallery: str) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"):
        answer = httpx.patch(f"{server}/v1/galleries/{gallery}", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 200, kind
