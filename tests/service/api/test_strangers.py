"""Strangers through the API: remembered if the gallery says so, by a search of the whole gallery at its own risk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from kith.wire.identification import IdentityOut
from kith.wire.strangers import SightingOut
from tests.conftest import jpeg
from tests.receivers import Receiver
from tests.service.api.conftest import KEY, Guarded

Photo = NDArray[np.uint8]


@pytest.fixture
def kith(operator: Kith) -> Kith:
    return operator


@pytest.fixture
def door(kith: Kith) -> str:
    return kith.create_gallery("door", remember_strangers_days=30).name


def largest(kith: Kith, photo: Photo, **options: Any) -> IdentityOut:
    return kith.identify("door", jpeg(photo), faces="largest", **options).results[0]


def seen(kith: Kith, photo: Photo) -> SightingOut:
    stranger = largest(kith, photo).stranger
    assert stranger is not None
    return stranger


def test_an_unknown_face_gets_an_id_and_a_name_later(
    kith: Kith, guarded: Guarded, astronaut: Photo, actor: Photo
) -> None:
    door = kith.create_gallery("door").name
    assert largest(kith, astronaut).stranger is None, "by default"
    kith.update_gallery(door, remember_strangers_days=30)
    before, threshold = kith.gallery(door), kith.risk(door).threshold
    first = seen(kith, astronaut)
    assert first.seen_count == 1
    other, again = seen(kith, actor), seen(kith, astronaut[:, ::-1])
    assert again.id == first.id != other.id
    page = httpx.get(f"{guarded.url}/v1/galleries/{door}/strangers?limit=1", headers={"X-API-Key": KEY}).json()
    assert len(page["data"]) == 1 and page["next"]
    assert [one.id for one in kith.strangers(door)] == [other.id, again.id]
    assert kith.stranger(door, again.id).model_dump(exclude={"template_count"}) == again.model_dump()
    # Strangers are no evidence, and in no count.
    assert kith.gallery(door).model_dump(exclude={"drift"}) == before.model_dump(exclude={"drift"})
    assert kith.risk(door).threshold == threshold
    assert b"".join(kith.export_gallery(door)).count(b"\n") == 1  # the header

    named = kith.promote_stranger(door, again.id, "eileen", "Eileen")
    assert (named.subject.name, named.receipt.kind) == ("Eileen", "moved")
    now = largest(kith, astronaut)
    assert (now.outcome, now.subject, now.stranger) == ("identified", "eileen", None)
    assert kith.gallery(door).template_count == named.template_count


def test_only_an_unknown_clear_face_of_a_full_search_at_the_own_risk_is_remembered(
    kith: Kith, door: str, astronaut: Photo
) -> None:
    vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
    assert vector is not None
    assert kith.identify(door, embeddings=[vector]).results[0].stranger is None
    assert largest(kith, astronaut, filter={"tags": ["staff"]}).stranger is None
    assert largest(kith, astronaut, risk={"fpir": 0.3}).stranger is None
    dark = (astronaut * 0.12).astype(np.uint8)  # but found with certainty
    assert largest(kith, dark).outcome == "rejected_quality"
    unchecked = largest(kith, dark, check_quality=False)
    assert (unchecked.outcome, unchecked.stranger, unchecked.reasons) == ("unknown", None, [])
    kith.enroll(door, "eileen", jpeg(astronaut), face="largest")
    assert largest(kith, astronaut).stranger is None
    assert list(kith.strangers(door)) == []


def test_a_photo_that_is_not_upright_founds_nobody(kith: Kith, door: str, receiver: Receiver, astronaut: Photo) -> None:
    kith.create_webhook(f"{receiver.origin}/all")
    head = astronaut[:300, 90:360]
    turned = [np.ascontiguousarray(np.rot90(head, turns)) for turns in (1, 2, 3)]
    found = [kith.identify(door, jpeg(photo), check_quality=False).results for photo in turned]
    weak = [result for results in found for result in results if result.face is not None]
    assert weak
    for result in weak:
        assert (result.outcome, result.stranger) == ("unknown", None)
        assert result.reasons == ["weak_detection", "try_detail_medium"]
    assert list(kith.strangers(door)) == []
    first, second = (kith.identify(door, jpeg(photo), detail="medium").results[0] for photo in (head, turned[1]))
    assert first.stranger is not None and second.stranger is not None
    assert first.stranger.id == second.stranger.id
    assert first.reasons == second.reasons == []
    events = [each.document for each in receiver.wait_for(3 + sum(not results[0].face for results in found))]
    assert all("weak_detection" not in event["data"].get("reasons", []) for event in events)
    # A receiver hears of a stranger once.
    (event,) = [event for event in events if event["type"] == "stranger_first_seen"]
    assert event["data"]["id"] == first.stranger.id
    assert event["data"].keys() == {"gallery", "id", "first_seen", "last_seen", "seen_count"}


def test_the_search_is_answered_if_nothing_can_be_written(
    kith: Kith, door: str, guarded: Guarded, astronaut: Photo
) -> None:
    with closing(sqlite3.connect(guarded.settings.data_dir / "kith.db")) as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON subjects BEGIN SELECT RAISE(ABORT, 'no room'); END")
        try:
            answer = largest(kith, astronaut)
            assert (answer.outcome, answer.stranger) == ("unknown", None)
            assert "stranger_not_stored" in answer.reasons
        finally:
            database.execute("DROP TRIGGER full")
    assert largest(kith, astronaut).stranger is not None
