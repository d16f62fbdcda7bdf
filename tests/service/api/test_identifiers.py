"""Ids, names, tags and metadata are equal in every entry if their composed (NFC) and decomposed (NFD) forms are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kith import Kith
from kith.options import FilterOptions
from kith.wire.keys import KeyIn
from kith.wire.webhooks import WebhookIn

NFC, NFD = "Jos\xe9", "Jose\u0301"
FORMS = [NFC, NFD]
PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"


def ids(kith: Kith, gallery: str) -> list[str]:
    return [each.id for each in kith.subjects(gallery)]


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("asked", FORMS)
def test_bodies_queries_and_filters(kith: Kith, gallery: str, stored: str, asked: str) -> None:
    vector = [1.0] + [0.0] * (kith.model().dimension - 1)
    put = kith.put_subject(gallery, stored, name=stored, tags=[stored], metadata={stored: {stored: [stored]}})
    assert (put.name, put.tags, put.metadata) == (NFC, [NFC], {NFC: {NFC: [NFC]}})
    kith.enroll(gallery, stored, embeddings=[vector])
    assert [each.id for each in kith.subjects(gallery, tags=[asked])] == [NFC]
    assert [each.id for each in kith.subjects(gallery, metadata={asked: {asked: [asked]}})] == [NFC]
    filters: list[FilterOptions] = [{"tags": [asked]}, {"metadata": {asked: {asked: [asked]}}}]
    for wanted in filters:
        (found,) = kith.identify(gallery, embeddings=[vector], risk={"threshold": 0.5}, filter=wanted).results
        assert found.subject == NFC
    assert kith.verify(vector, (gallery, asked), risk={"threshold": 0.5}).similarity == pytest.approx(1)
    assert {line.subject for line in kith.audit(gallery, subject=asked)} == {
        line.subject for line in kith.audit(gallery, subject=stored)
    }
    kith.put_subject(gallery, "other")
    kith.merge_subject(gallery, "other", asked)
    assert ids(kith, gallery) == [NFC]
    assert kith.update_subject(gallery, asked, tags=[stored, "x"]).tags == [NFC, "x"]
    assert kith.subject(gallery, asked).id == kith.put_subject(gallery, asked).id == NFC
    assert KeyIn(name=stored, scopes=["read"]).name == WebhookIn(url="https://a.example", name=stored).name == NFC
    erased = kith.delete_subject(gallery, asked)
    assert ids(kith, gallery) == []
    assert erased.receipt.id in [each.id for each in kith.erasures(gallery, stored)]


def test_imports(kith: Kith, gallery: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"subject": NFD, "name": NFD, "tags": [NFD], "metadata": {NFD: NFD}},
        {"subject": PERSIAN},
        {"subject": "\U0001fae9"},
        {"subject": "a\u202eb"},
        {"subject": NFC},
    ]
    served = kith.model()
    header = {"kith": "gallery", "version": 1, "recognizer": served.recognizer, "dimension": served.dimension}
    (tmp_path / "people.ndjson").write_text("\n".join(map(json.dumps, [header, *rows])))
    report = kith.import_gallery(gallery, tmp_path / "people.ndjson")
    assert report.refused_count == 1
    assert sorted(ids(kith, gallery)) == sorted([NFC, PERSIAN, "\U0001fae9"])
    stored = kith.subject(gallery, NFC)
    assert (stored.name, stored.tags, stored.metadata) == (NFC, [NFC], {NFC: NFC})
