"""Audit of a real server: entries of every action, and no personal data in them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import numpy as np
from numpy.typing import NDArray

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.service.api.conftest import KEY, Guarded

GALLERY = "staff"
IDS = ("Ada-Lovelace-1815", "Grace-Hopper-1906")


def test_every_action_is_audited_without_personal_data(
    astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    photo, other, file = jpeg(astronaut), jpeg(actor), tmp_path / "staff.ndjson"
    settings = load_settings(data_dir=tmp_path / "data", log_level="WARNING", audit_searches="before")
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery(GALLERY, keep_crops=True)
        kith.update_gallery(GALLERY, risk={"fpir": 0.02})
        kith.put_subject(GALLERY, IDS[0], "Augusta Ada King", {"mail": "countess@example.org"}, ["engine-room"])
        kith.put_subject(GALLERY, IDS[1])
        kith.enroll(GALLERY, IDS[0], photo)
        kith.enroll(GALLERY, IDS[1], other)
        kith.identify(GALLERY, photo)
        kith.identify(GALLERY, photo, other)
        kith.verify((GALLERY, IDS[0]), photo)
        (template,) = kith.templates(GALLERY, IDS[1])
        kith.move_template(GALLERY, IDS[1], template.id, IDS[0])
        kith.delete_template(GALLERY, IDS[0], template.id)
        file.write_bytes(b"".join(kith.export_gallery(GALLERY, crops=True)))
        kith.import_gallery("copy", file, create=True)
        kith.delete_subject(GALLERY, IDS[1])
        kith.delete_gallery("copy")

        whole = list(kith.audit(GALLERY))[::-1]
        assert [line.number for line in whole] == sorted({line.number for line in whole})
        entries = [line for line in whole if line.event != "threshold_moved"]  # by a background task at any time
        assert [line.event for line in entries] == [
            "gallery_created",
            "gallery_updated",
            *["subject_put"] * 2,
            *["templates_enrolled"] * 2,
            *["searched"] * 2,
            "verified",
            "template_moved",
            "template_deleted",
            "gallery_exported",
            "subject_deleted",
        ]
        assert all(line.request_id for line in entries) and {line.actor for line in entries} == {"anonymous"}
        ada = entries[4].subject
        assert entries[1].details == {"changed": {"risk": {"kind": "fpir", "value": 0.02}}}
        assert (entries[6].details, entries[6].subject) == ({"outcomes": {"identified": 1}}, ada)
        assert (entries[7].details["outcomes"], entries[7].details["subjects"][0]) == ({"identified": 2}, ada)
        assert entries[8].outcome == "same"
        of_ada = [line.event for line in kith.audit(GALLERY, subject=IDS[0])][::-1]
        moved = ["template_moved", "template_deleted"]  # to this subject
        assert of_ada == ["subject_put", "templates_enrolled", "searched", "searched", "verified", *moved]
        assert [line.event for line in kith.audit(GALLERY, event="searched", since="2026-01-01")] == ["searched"] * 2
        assert not list(kith.audit(GALLERY, until="2026-01-01T00:00:00Z"))
        assert not list(kith.audit(GALLERY, since="2100-01-01")) and not list(kith.audit(GALLERY, actor="operator"))
        assert {line.event for line in kith.audit()} >= {"gallery_imported", "gallery_deleted"}
        assert [line.gallery for line in kith.audit(None, gallery="copy", event="gallery_created")] == ["copy"]
        page = httpx.get(f"{url}/v1/galleries/{GALLERY}/audit?limit=4").json()
        rest = httpx.get(f"{url}/v1/galleries/{GALLERY}/audit?limit=100&cursor={page['next']}").json()
        assert [len(page["data"]), rest["next"]] == [4, None]
        assert [line["number"] for line in page["data"] + rest["data"]] == [line.number for line in whole[::-1]]
    with closing(sqlite3.connect(settings.data_dir / "kith.db")) as database:
        held = repr(database.execute("SELECT * FROM audit").fetchall())
    assert held.count("searched") == 2
    for personal in (*IDS, "Augusta", "countess", "engine-room", "similarity", "score"):
        assert personal not in held


def test_refused_requests_are_audited_and_counted(guarded: Guarded) -> None:
    def counted(kith: Kith) -> Counter[tuple[str, str | None]]:
        found = Counter[tuple[str, str | None]]()
        for line in kith.audit(event="access_refused"):
            found[line.actor, line.outcome] += line.details["count"]
        return found

    with Kith(guarded.url, KEY) as kith:
        kith.create_gallery("audited")
        kith.create_gallery("secret")
        made, before = kith.create_key("reader", ["read"], galleries=["audited"]), counted(kith)
        for path, key in (
            ("/v1/galleries/audited", None),
            ("/v1/galleries/audited", "kith_wrong"),
            ("/v1/galleries/audited/audit", made.token),
            ("/v1/galleries/secret", made.token),
            ("/v1/galleries/absent", made.token),
            ("/v1/jobs?gallery=secret", made.token),
        ):
            headers = {} if key is None else {"X-API-Key": key}
            assert httpx.get(guarded.url + path, headers=headers).status_code >= 400
        new = counted(kith) - before
        for gallery in ("audited", "secret"):
            kith.delete_gallery(gallery)
    name = f"key:{made.id}"
    assert new == {("anonymous", "unauthorized"): 2, (name, "forbidden"): 1, (name, "gallery_not_found"): 3}
