"""The audit through a real server: what everything leaves in it, whom it names, and what it does not say."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.recognition import unit
from service.client import Kith
from service.server import embedded
from service.settings import Settings, load_settings
from tests.conftest import jpeg
from tests.service.test_audit import brief, report_of

GALLERY = "staff"
IDS = ("Ada-Lovelace-1815", "Grace-Hopper-1906")
NAMES = ("Augusta Ada King", "Rear Admiral Hopper")
SECRETS = ("engine-room", "countess@example.org", "likes-bernoulli")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", log_level="WARNING", audit_searches="before")


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    with embedded(settings) as serving:
        yield serving


@pytest.fixture
def kith(url: str) -> Iterator[Kith]:
    with Kith(url) as client:
        yield client


def everything(kith: Kith, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], folder: Path) -> list[float]:
    """Each route that changes or searches, once at least; returns a vector that was stored."""
    photo, other = jpeg(astronaut), jpeg(actor)
    kith.create_gallery(GALLERY, keep_crops=True)
    kith.update_gallery(GALLERY, risk={"fpir": 0.01})
    kith.put_subject(GALLERY, IDS[0], NAMES[0], {"mail": SECRETS[1]}, [SECRETS[0]])
    kith.put_subject(GALLERY, IDS[1], NAMES[1], {"note": SECRETS[2]})
    kith.enrol(GALLERY, IDS[0], photo)
    kith.enrol(GALLERY, IDS[1], other)
    (seen,) = kith.embed(photo).images[0].faces
    assert seen.embedding is not None
    assert kith.identify(GALLERY, photo).results[0].subject == IDS[0]
    kith.identify(GALLERY, photo, other)
    kith.verify((GALLERY, IDS[0]), photo)
    kith.verify((GALLERY, IDS[0]), (GALLERY, IDS[1]))
    (template,) = kith.templates(GALLERY, IDS[1])
    kith.move_template(GALLERY, IDS[1], template.id, IDS[0])
    kith.delete_template(GALLERY, IDS[0], template.id)
    file = folder / "staff.ndjson"
    file.write_bytes(b"".join(kith.export_gallery(GALLERY, crops=True)))
    kith.import_gallery("copy", file, create=True)
    kith.delete_subject(GALLERY, IDS[1])
    kith.delete_gallery("copy")
    return [float(str(value)) for value in seen.embedding]


def test_everything_is_told_of_and_nobody_is_named(
    kith: Kith, url: str, settings: Settings, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    vector = everything(kith, astronaut, actor, tmp_path)
    whole = list(kith.audit(GALLERY))[::-1]
    assert [line.number for line in whole] == list(range(1, len(whole) + 1))
    told = [line for line in whole if line.event != "threshold_moved"]  # by itself, whenever it comes to it
    events = [line.event for line in told]
    assert events == [
        "gallery_created",
        "gallery_updated",
        "subject_put",
        "subject_put",
        "templates_enrolled",
        "templates_enrolled",
        "searched",
        "searched",
        "verified",
        "verified",
        "verified",
        "template_moved",
        "template_deleted",
        "gallery_exported",
        "subject_deleted",
    ]
    assert all(line.request_id for line in told) and {line.actor for line in told} == {"anonymous"}
    assert told[1].details == {"changed": {"risk": {"kind": "fpir", "value": 0.01}}}
    assert told[6].details == {"outcomes": {"identified": 1}} and told[6].subject == told[4].subject
    assert told[7].details["outcomes"] == {"identified": 2} and told[7].details["subjects"][0] == told[4].subject
    assert [line.outcome for line in told if line.event == "verified"] == ["same", "different", "different"]

    # Who was looked up, or changed, by whom.
    ada = [line.event for line in kith.audit(GALLERY, subject=IDS[0])][::-1]
    assert ada == [
        "subject_put",
        "templates_enrolled",
        "searched",
        "searched",
        "verified",
        "verified",
        "template_moved",  # to her
        "template_deleted",
    ]
    assert not list(kith.audit(GALLERY, subject="nobody"))
    assert [line.event for line in kith.audit(GALLERY, event="searched", since="2026-01-01")] == ["searched"] * 2
    assert not list(kith.audit(GALLERY, until="2026-01-01T00:00:00Z"))

    everywhere = list(kith.audit())
    assert {line.event for line in everywhere} >= {"gallery_imported", "gallery_deleted"}
    assert {line.chain for line in kith.audit(event="gallery_deleted")} == {"gallery", "service"}
    assert [line.event for line in kith.audit(None, gallery="copy")][-1] == "gallery_created"
    page = httpx.get(f"{url}/v1/galleries/{GALLERY}/audit?limit=4").json()
    assert [line["number"] for line in page["lines"]] == [whole[-n].number for n in (1, 2, 3, 4)]
    page = httpx.get(f"{url}/v1/galleries/{GALLERY}/audit?limit=100&cursor={page['next']}").json()
    assert [line["number"] for line in page["lines"]] == list(range(len(whole) - 4, 0, -1)) and page["next"] is None

    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as database:
        rows = database.execute("SELECT * FROM audit").fetchall()
        heads = database.execute("SELECT * FROM audit_heads").fetchall()
    held = repr(rows + heads)
    assert len(rows) > 20
    # Fewer digits would now and then be found in the time of a line.
    for personal in (*IDS, *NAMES, *SECRETS, *(str(float(value))[:10] for value in vector[:50])):
        assert personal not in held
    raw = np.array(vector, np.float32).tobytes()
    assert raw[:6].hex() not in held and base64.b64encode(raw)[:8].decode() not in held
    assert "similarity" not in held and "score" not in held


def test_what_was_searched_before_a_stop_is_there_after_it(settings: Settings) -> None:
    vectors = unit(np.random.default_rng(0).normal(size=(3, 128)))
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery(GALLERY)
        kith.enrol(GALLERY, IDS[0], embeddings=list(vectors))
        kith.identify(GALLERY, embeddings=[vectors[0]])
    assert brief(report_of(settings.sql_url, None).faults) == []
    with embedded(settings) as url, Kith(url) as kith:
        assert "searched" in [line.event for line in kith.audit(GALLERY)]


def test_a_search_that_is_written_before_is_on_disk_when_it_is_answered(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING", audit_searches="before")
    vectors = unit(np.random.default_rng(0).normal(size=(1, 128)))
    with embedded(settings) as url, Kith(url) as kith, closing(sqlite3.connect(tmp_path / "kith.db")) as database:
        kith.create_gallery(GALLERY)
        for count in range(1, 4):
            kith.identify(GALLERY, embeddings=[vectors[0]])
            query = "SELECT count(*) FROM audit WHERE event = 'searched'"
            assert database.execute(query).fetchone() == (count,)


def test_whoever_is_refused_is_told_of_and_counted(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="WARNING", api_key="k" * 32)
    with embedded(settings) as url, Kith(url, "k" * 32) as kith:
        kith.create_gallery(GALLERY)
        kith.create_gallery("secret")
        made = kith.create_key("reader", ["read"], galleries=[GALLERY])
        for path, key in (
            (f"/v1/galleries/{GALLERY}", None),
            (f"/v1/galleries/{GALLERY}", "kith_wrong"),
            (f"/v1/galleries/{GALLERY}/audit", made.token),
            ("/v1/galleries/secret", made.token),
            ("/v1/galleries/absent", made.token),
            ("/v1/jobs?gallery=secret", made.token),
        ):
            assert httpx.get(url + path, headers={} if key is None else {"X-API-Key": key}).status_code >= 400
        refused = [(line.actor, line.outcome, line.details["count"]) for line in kith.audit(event="access_refused")]
    name = f"key:{made.id}"
    counted: dict[tuple[str, str], int] = {}
    for actor, outcome, count in refused:
        counted[actor, outcome] = counted.get((actor, outcome), 0) + count
    assert counted == {("anonymous", "unauthorized"): 2, (name, "forbidden"): 1, (name, "gallery_not_found"): 3}
