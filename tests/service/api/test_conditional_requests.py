"""ETag, If-Match and If-None-Match of galleries and subjects, on a real server with each kind of database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from service.app import create_app
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg, url_maker


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("conditions")
    settings = load_settings(data_dir=folder, database_url=url_maker(request, folder)(), log_level="WARNING")
    with embedded(settings) as url:
        yield url


def refused(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(KithClientError) as raised:
        call()
    return raised.value.status, raised.value.code


STALE = (412, "precondition_failed")


def test_a_stale_change_of_a_subject_is_refused(kith: Kith, gallery: str) -> None:
    first = kith.put_subject(gallery, "ada", name="Ada")
    second = kith.update_subject(gallery, "ada", tags=["a"], if_match=first.etag)
    assert second.etag != first.etag
    for stale in (
        lambda: kith.update_subject(gallery, "ada", name="Eve", if_match=first.etag),
        lambda: kith.put_subject(gallery, "ada", name="Eve", if_match=first.etag),
        lambda: kith.delete_subject(gallery, "ada", if_match=first.etag),
    ):
        assert refused(stale) == STALE
    assert kith.subject(gallery, "ada") == second == next(kith.subjects(gallery))
    third = kith.put_subject(gallery, "ada", name="Ada King", if_match=second.etag)
    assert third.tags == []
    assert kith.delete_subject(gallery, "ada", if_match=third.etag).subject_count == 1
    assert refused(lambda: kith.put_subject(gallery, "ada", if_match=third.etag)) == STALE  # it does not exist
    assert refused(lambda: kith.put_subject(gallery, "ada", if_match="*")) == STALE


def test_a_subject_that_was_created_again_is_another_one(kith: Kith, gallery: str) -> None:
    first = kith.put_subject(gallery, "ada", name="Ada")
    kith.delete_subject(gallery, "ada")
    kith.put_subject(gallery, "ada", name="Ada")
    assert refused(lambda: kith.update_subject(gallery, "ada", name="Eve", if_match=first.etag)) == STALE


def test_a_stale_change_of_a_gallery_is_refused(kith: Kith, server: str) -> None:
    first = kith.create_gallery("stale")
    second = kith.update_gallery("stale", retention_days=30, if_match=first.etag)
    assert refused(lambda: kith.update_gallery("stale", retention_days=60, if_match=first.etag)) == STALE
    assert refused(lambda: kith.delete_gallery("stale", if_match=first.etag)) == STALE
    assert kith.gallery("stale").retention_days == 30
    third = kith.update_gallery("stale", recall=0.9, if_match=kith.gallery("stale").etag)  # as read, with its drift
    assert refused(lambda: kith.update_gallery("stale", if_match=second.etag)) == STALE
    kith.delete_gallery("stale", if_match=third.etag)
    kith.create_gallery("stale")
    assert refused(lambda: kith.delete_gallery("stale", if_match=first.etag)) == STALE
    kith.delete_gallery("stale", if_match="*")


def test_an_enrollment_refuses_no_change_of_what_it_leaves(kith: Kith, gallery: str, server: str) -> None:
    of_subject, of_gallery = kith.put_subject(gallery, "ada").etag, kith.gallery(gallery).etag
    vector = np.random.default_rng(1).normal(size=kith.model().dimension)
    kith.enroll(gallery, "ada", embeddings=[vector])
    assert kith.subject(gallery, "ada").etag != of_subject  # the answer is another one
    assert kith.gallery(gallery).etag != of_gallery
    assert kith.update_subject(gallery, "ada", name="Ada", if_match=of_subject).template_count == 1
    assert kith.update_gallery(gallery, recall=0.9, if_match=of_gallery).template_count == 1


@pytest.mark.parametrize("kind", ["gallery", "subject"])
def test_of_concurrent_writers_with_one_etag_one_wins(kith: Kith, gallery: str, kind: str) -> None:
    kith.put_subject(gallery, "ada", name="0")
    for turn in range(5):
        etag = kith.gallery(gallery).etag if kind == "gallery" else kith.subject(gallery, "ada").etag

        def write(writer: int, etag: str = etag, turn: int = turn) -> str:
            number = 1 + turn * 8 + writer
            try:
                if kind == "gallery":
                    return str(kith.update_gallery(gallery, retention_days=number, if_match=etag).retention_days)
                return str(kith.update_subject(gallery, "ada", name=str(number), if_match=etag).name)
            except KithClientError as error:
                return error.code

        with ThreadPoolExecutor(8) as writers:
            became = list(writers.map(write, range(8)))
        assert became.count("precondition_failed") == 7
        (won,) = set(became) - {"precondition_failed"}
        stored = kith.gallery(gallery).retention_days if kind == "gallery" else kith.subject(gallery, "ada").name
        assert str(stored) == won


def test_counting_up_with_etags_loses_no_count(kith: Kith, gallery: str) -> None:
    kith.put_subject(gallery, "ada", metadata={"visits": 0})

    def count(_: int) -> None:
        while True:
            ada = kith.subject(gallery, "ada")
            try:
                kith.update_subject(gallery, "ada", metadata={"visits": ada.metadata["visits"] + 1}, if_match=ada.etag)
                return
            except KithClientError as error:
                assert error.code == "precondition_failed"

    with ThreadPoolExecutor(4) as desks:
        list(desks.map(count, range(20)))
    assert kith.subject(gallery, "ada").metadata == {"visits": 20}


def test_an_answer_that_the_client_has_is_not_sent_again(kith: Kith, gallery: str, server: str) -> None:
    kith.put_subject(gallery, "ada", name="Ada")
    for path in (f"/v1/galleries/{gallery}", f"/v1/galleries/{gallery}/subjects/ada"):
        with httpx.Client(base_url=server) as http:
            found = http.get(path)
            etag = found.headers["etag"]
            assert found.json()["etag"] == etag
            assert found.headers["cache-control"] == "private, no-cache"
            for known in (etag, f'"other", W/{etag}', "*"):
                again = http.get(path, headers={"If-None-Match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
            assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
            kith.update_subject(gallery, "ada", name="Eve")
            kith.update_gallery(gallery, recall=0.9)
            assert http.get(path, headers={"If-None-Match": etag}).status_code == 200


def test_every_write_answers_the_etag_that_the_next_read_answers(kith: Kith, gallery: str, server: str) -> None:
    path = f"/v1/galleries/{gallery}/subjects/ada"
    with httpx.Client(base_url=server) as http:
        for method, body in (("PUT", {"name": "Ada"}), ("PATCH", {"tags": ["a"]}), ("PUT", {"name": "Ada"})):
            written = http.request(method, path, json=body)
            assert written.headers["etag"] == http.get(path).headers["etag"]
        changed = http.patch(f"/v1/galleries/{gallery}", json={"risk": {"fpir": 0.001}, "review_factor": 3})
    (listed,) = [one for one in kith.galleries() if one.name == gallery]
    assert changed.headers["etag"] == changed.json()["etag"] == listed.etag


def test_a_malformed_condition_is_rejected(kith: Kith, gallery: str, server: str) -> None:
    answer = httpx.patch(f"{server}/v1/galleries/{gallery}", json={"recall": 0.9}, headers={"If-Match": "abc"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    compressed = f"W/{kith.gallery(gallery).etag}"  # by a proxy
    assert kith.update_gallery(gallery, recall=0.9, if_match=compressed).recall == 0.9


def test_the_openapi_document_tells_all_conditions(server: str) -> None:
    """Each If-Match can give 412, and the routes with an ETag are those whose answers have one."""
    document = create_app(load_settings(log_level="ERROR")).openapi()
    operations = {
        (method, path): operation for path, own in document["paths"].items() for method, operation in own.items()
    }
    for operation in operations.values():
        headers = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "header"}
        codes = operation["responses"].get("412", {}).get("x-codes", [])
        assert ("If-Match" in headers) == ("precondition_failed" in codes)
        assert "428" not in operation["responses"], "a condition is never required"
        if "304" in operation["responses"]:
            assert "If-None-Match" in headers
    assert sum("412" in operation["responses"] for operation in operations.values()) == 6


def test_answers_have_the_etag_that_the_openapi_document_tells(
    kith: Kith, gallery: str, server: str, astronaut: NDArray[np.uint8]
) -> None:
    kith.update_gallery(gallery, keep_crops=True, remember_strangers_days=30)
    stranger = kith.identify(gallery, jpeg(astronaut), faces="largest").results[0].stranger
    template = kith.enroll(gallery, "ada", jpeg(astronaut), face="largest").results[0].template
    assert stranger is not None and template is not None
    known = {"gallery": gallery, "subject": "ada", "template": template, "stranger": stranger.id}
    endless = {"/v1/events"}
    with httpx.Client(base_url=server, timeout=60) as http:
        document = http.get("/openapi.json").json()
        seen = 0
        for path, operations in document["paths"].items():
            names = {part[1:-1] for part in path.split("/") if part.startswith("{")}
            if "get" not in operations or not names <= known.keys() or path in endless:
                continue
            response = http.get(path.format(**known))
            assert response.status_code == 200, path
            documented = "ETag" in operations["get"]["responses"]["200"].get("headers", {})
            assert ("etag" in response.headers) == documented, path
            assert ("304" in operations["get"]["responses"]) == documented
            if documented:
                seen += 1
                same = http.get(path.format(**known), headers={"If-None-Match": response.headers["etag"]})
                assert (same.status_code, same.headers["etag"]) == (304, response.headers["etag"])
        assert seen == 5
        home = f"/v1/galleries/{gallery}"
        for method, path, url in (
            ("post", "/v1/galleries", "/v1/galleries"),
            ("patch", "/v1/galleries/{gallery}", home),
            ("put", "/v1/galleries/{gallery}/subjects/{subject}", f"{home}/subjects/grace"),
            ("patch", "/v1/galleries/{gallery}/subjects/{subject}", f"{home}/subjects/grace"),
        ):
            response = http.request(method, url, json={"name": "tagged"} if method == "post" else {})
            told = document["paths"][path][method]["responses"][str(response.status_code)]
            assert "ETag" in told["headers"]
            assert response.headers["etag"] == response.json()["etag"]
