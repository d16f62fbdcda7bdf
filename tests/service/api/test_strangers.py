"""Strangers through the API: remembered if the gallery says so, by a search of the whole gallery at its own risk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import sqlalchemy as sa
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from kith import Kith, KithClientError
from kith.wire.identification import IdentityOut
from service.security.api_keys import Rights
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.api_keys import KeyStore
from tests.conftest import jpeg
from tests.databases import engine_of, open_database
from tests.receivers import Receiver, receiving

Photo = NDArray[np.uint8]
Place = tuple[str, Receiver, Settings]
OPERATOR = "an operator key of sufficient length"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with receiving() as receiver:
        settings = load_settings(
            data_dir=tmp_path_factory.mktemp("strangers"),
            api_key=OPERATOR,
            webhook_hosts=receiver.origin,
            log_level="ERROR",
        )
        with embedded(settings) as url:
            yield url, receiver, settings


@pytest.fixture
def kith(place: Place) -> Iterator[Kith]:
    with Kith(place[0], OPERATOR) as kith:
        yield kith
        for webhook in list(kith.webhooks()):
            kith.delete_webhook(webhook.id)
        for gallery in list(kith.galleries()):
            kith.delete_gallery(gallery.name)


@pytest.fixture
def door(kith: Kith) -> str:
    return kith.create_gallery("door", remember_strangers_days=30).name


def largest(kith: Kith, photo: Photo, **options: Any) -> IdentityOut:
    return kith.identify("door", jpeg(photo), faces="largest", **options).results[0]


def test_off_by_default(kith: Kith, astronaut: Photo) -> None:
    kith.create_gallery("door")
    assert kith.gallery("door").remember_strangers_days is None
    assert largest(kith, astronaut).stranger is None
    assert list(kith.strangers("door")) == []


def test_an_unknown_face_gets_an_id_and_a_name_later(kith: Kith, door: str, astronaut: Photo, actor: Photo) -> None:
    first = largest(kith, astronaut)
    assert first.outcome == "unknown" and first.stranger is not None
    assert first.stranger.seen_count == 1
    other = largest(kith, actor).stranger
    again = largest(kith, astronaut[:, ::-1]).stranger
    assert again is not None and other is not None
    assert again.id == first.stranger.id != other.id
    assert [one.id for one in kith.strangers(door)] == [other.id, again.id]
    assert kith.stranger(door, again.id).model_dump(exclude={"template_count"}) == again.model_dump()

    named = kith.promote_stranger(door, again.id, "eileen", "Eileen")
    assert (named.subject.name, named.receipt.kind) == ("Eileen", "moved")
    now = largest(kith, astronaut)
    assert (now.outcome, now.subject, now.stranger) == ("identified", "eileen", None)
    assert kith.gallery(door).template_count == named.template_count


def test_strangers_are_no_evidence_and_in_no_count(kith: Kith, door: str, astronaut: Photo) -> None:
    before = kith.gallery(door), kith.risk(door)
    largest(kith, astronaut)
    after = kith.gallery(door)
    assert after.model_dump(exclude={"drift"}) == before[0].model_dump(exclude={"drift"})
    assert kith.risk(door) == before[1]
    assert b"".join(kith.export_gallery(door)).count(b"\n") == 1  # the header


def test_the_list_has_pages(kith: Kith, door: str, place: Place, group: Photo) -> None:
    found = kith.identify(door, jpeg(group)).results
    ids = [one.stranger.id for one in found if one.stranger is not None]
    assert len(set(ids)) == len(ids) > 2
    address, key = f"{place[0]}/v1/galleries/{door}/strangers?limit=1", {"X-API-Key": OPERATOR}
    page = httpx.get(address, headers=key).json()
    assert len(page["data"]) == 1 and page["next"]
    assert [one.id for one in kith.strangers(door)] == list(reversed(ids))


def test_only_a_full_search_at_the_own_risk_remembers(kith: Kith, door: str, astronaut: Photo) -> None:
    (face,) = kith.embed(jpeg(astronaut)).images[0].faces
    vector = face.embedding
    assert vector is not None
    assert kith.identify(door, embeddings=[vector]).results[0].stranger is None
    assert largest(kith, astronaut, filter={"tags": ["staff"]}).stranger is None
    assert largest(kith, astronaut, risk={"fpir": 0.3}).stranger is None
    assert list(kith.strangers(door)) == []


def test_a_known_face_is_no_stranger(kith: Kith, door: str, astronaut: Photo) -> None:
    kith.enroll(door, "eileen", jpeg(astronaut), face="largest")
    assert largest(kith, astronaut).stranger is None
    assert list(kith.strangers(door)) == []


def test_a_blurred_face_founds_nobody(kith: Kith, door: str, astronaut: Photo) -> None:
    blurred = np.asarray(Image.fromarray(astronaut).filter(ImageFilter.GaussianBlur(5)))
    assert largest(kith, blurred).outcome == "rejected_quality"
    unchecked = largest(kith, blurred, check_quality=False)
    assert (unchecked.outcome, unchecked.stranger) == ("unknown", None)
    assert list(kith.strangers(door)) == []


def test_a_photo_that_is_not_upright_founds_nobody(kith: Kith, door: str, place: Place, astronaut: Photo) -> None:
    receiver = place[1]
    receiver.messages.clear()
    kith.create_webhook(f"{receiver.origin}/all")
    head = astronaut[:300, 90:360]
    turned = [np.ascontiguousarray(np.rot90(head, turns)) for turns in (1, 2, 3)]
    seen = [kith.identify(door, jpeg(photo), check_quality=False).results for photo in turned]
    weak = [result for results in seen for result in results if result.face is not None]
    assert weak
    for result in weak:
        assert (result.outcome, result.stranger) == ("unknown", None)
        assert result.reasons == ["weak_detection", "try_detail_medium"]
    assert list(kith.strangers(door)) == []
    first, second = (kith.identify(door, jpeg(photo), detail="medium").results[0] for photo in (head, turned[1]))
    assert first.stranger is not None and second.stranger is not None
    assert first.stranger.id == second.stranger.id
    assert first.reasons == second.reasons == []
    events = [each.document for each in receiver.wait_for(3 + sum(not results[0].face for results in seen))]
    assert all("weak_detection" not in event["data"].get("reasons", []) for event in events)
    assert sum(event["type"] == "stranger_first_seen" for event in events) == 1


def test_pictures_only_if_the_gallery_keeps_crops(kith: Kith, door: str, astronaut: Photo) -> None:
    plain = largest(kith, astronaut).stranger
    assert plain is not None
    assert kith.crops(door, [{"stranger": plain.id}]) == [None]
    kith.forget_strangers(door)
    kith.update_gallery(door, keep_crops=True)
    pictured = largest(kith, astronaut).stranger
    assert pictured is not None
    (crop,) = kith.crops(door, [{"stranger": pictured.id}])
    assert crop is not None and Image.open(io.BytesIO(crop)).format == "WEBP"
    assert kith.export_stranger(door, pictured.id)["subject"]["templates"][0]["crops"][0]["image"]
    (read,) = kith.audit(door, event="crop_read")
    assert read.details == {"count": 1, "strangers": [pictured.id]}


def test_merging_and_forgetting(kith: Kith, door: str, astronaut: Photo, actor: Photo) -> None:
    one, other = largest(kith, astronaut).stranger, largest(kith, actor).stranger
    assert one is not None and other is not None
    merged = kith.merge_stranger(door, one.id, other.id)
    assert (merged.stranger.id, merged.stranger.seen_count, merged.stranger.template_count) == (other.id, 2, 2)
    assert (again := largest(kith, astronaut).stranger) is not None and again.id == other.id
    done = kith.forget_stranger(door, other.id)
    assert (done.subject_count, done.receipt.subject) == (1, other.id)
    assert kith.forget_stranger(door, other.id).receipt.id == done.receipt.id
    with pytest.raises(KithClientError) as gone:
        kith.stranger(door, other.id)
    assert (gone.value.status, gone.value.code) == (404, "stranger_not_found")
    assert largest(kith, astronaut).stranger is not None
    assert kith.forget_strangers(door).subject_count == 1


def test_a_key_that_may_only_identify_remembers_and_manages_nothing(
    kith: Kith, door: str, place: Place, astronaut: Photo
) -> None:
    with closing(open_database(place[2].sql_url)) as database:
        token = KeyStore(database).create("camera", Rights(frozenset({"identify"}), frozenset({door})))[1]
    with Kith(place[0], token) as camera:
        seen = largest(camera, astronaut).stranger
        assert seen is not None
        for refused in (camera.stranger, camera.forget_stranger, camera.export_stranger):
            with pytest.raises(KithClientError, match="forbidden"):
                refused(door, seen.id)
    (line,) = [line for line in kith.audit(door) if line.event == "stranger_remembered"]
    assert line.actor != "anonymous" and line.details == {"stranger": seen.id}


def test_the_search_is_answered_if_nothing_can_be_written(
    kith: Kith, door: str, place: Place, astronaut: Photo
) -> None:
    engine = engine_of(place[2].sql_url)
    with engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TRIGGER full BEFORE INSERT ON subjects BEGIN SELECT RAISE(ABORT, 'no room'); END")
        )
    try:
        answer = largest(kith, astronaut)
        assert (answer.outcome, answer.stranger) == ("unknown", None)
        assert "stranger_not_stored" in answer.reasons
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TRIGGER full"))
        engine.dispose()
    assert largest(kith, astronaut).stranger is not None


def test_a_receiver_hears_of_a_stranger_once(
    kith: Kith, door: str, place: Place, astronaut: Photo, actor: Photo
) -> None:
    receiver = place[1]
    receiver.messages.clear()
    kith.create_webhook(f"{receiver.origin}/new", types=["stranger_first_seen", "stranger_seen_again"])
    for _ in range(3):
        seen = largest(kith, astronaut).stranger
    other = largest(kith, actor).stranger
    assert seen is not None and other is not None
    first, second = receiver.wait_for(2)
    assert [each.document["data"]["id"] for each in (first, second)] == [seen.id, other.id]
    assert first.document["type"] == "stranger_first_seen"
    assert first.document["data"].keys() == {"gallery", "id", "first_seen", "last_seen", "seen_count"}
