"""Unusual text, names and vectors are stored and returned unchanged, or refused; composed (NFC) and decomposed (NFD)
forms are equal.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from kith import Kith
from kith.options import FilterOptions
from kith.wire.keys import KeyIn
from kith.wire.transfer import ImportOut
from kith.wire.webhooks import WebhookIn


def test_vectors_of_any_length_are_unit_vectors_or_refused(
    kith: Kith, gallery: str, server: str, tmp_path: Path
) -> None:
    """No vector gives another face a similarity outside -1 to 1."""
    model, url = kith.model(), f"{server}/v1/verify"
    ordinary = np.random.default_rng(0).normal(size=model.dimension).tolist()
    # The second is denormal in float32, which ends at 3e38.
    for number, status in ((5e-324, 422), (1e-45, 422), (-1e-30, 422), (1e38, 200), (-1e39, 200), (1.7e308, 422)):
        vector = [number] + [-0.0] * (model.dimension - 1)
        response = httpx.post(url, json={"a": {"embedding": vector}, "b": {"embedding": ordinary}})
        assert response.status_code == status, response.text
        assert status == 422 or abs(response.json()["similarity"]) <= 1

    numbers = ("nan", "inf", "-inf", "0", "5e-324", "3.4e38")
    vectors = (np.full(model.dimension, float(number), "<f4").tobytes() for number in numbers)
    rows = ({"subject": f"f{n}", "embedding": base64.b64encode(raw).decode()} for n, raw in enumerate(vectors))
    report = imported(kith, gallery, tmp_path, *rows)
    assert (report.template_count, kith.subject(gallery, "f5").template_count) == (1, 1)


def imported(kith: Kith, gallery: str, folder: Path, *rows: dict[str, Any]) -> ImportOut:
    """Import rows of an export file."""
    served = kith.model()
    header = {"kith": "gallery", "version": 1, "recognizer": served.recognizer, "dimension": served.dimension}
    (folder / "people.ndjson").write_text("\n".join(map(json.dumps, [header, *rows])))
    return kith.import_gallery(gallery, folder / "people.ndjson")


NFC, NFD = "Jos\xe9", "Jose\u0301"
PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"


def ids(kith: Kith, gallery: str) -> list[str]:
    return [each.id for each in kith.subjects(gallery)]


@pytest.mark.parametrize(("stored", "asked"), [(NFC, NFD), (NFD, NFC)])
def test_bodies_queries_and_filters(kith: Kith, gallery: str, stored: str, asked: str) -> None:
    vector = [1.0] + [0.0] * (kith.model().dimension - 1)
    put = kith.put_subject(gallery, stored, name=stored, tags=[stored], metadata={stored: {stored: [stored]}})
    assert (put.name, put.tags, put.metadata) == (NFC, [NFC], {NFC: {NFC: [NFC]}})
    kith.enroll(gallery, stored, embeddings=[vector])
    assert [each.id for each in kith.subjects(gallery, [asked], {asked: {asked: [asked]}})] == [NFC]
    wanted: FilterOptions = {"tags": [asked], "metadata": {asked: {asked: [asked]}}}
    (found,) = kith.identify(gallery, embeddings=[vector], risk={"threshold": 0.5}, filter=wanted).results
    assert found.subject == NFC
    assert kith.verify(vector, (gallery, asked), risk={"threshold": 0.5}).similarity == pytest.approx(1)
    lines = [[line.number for line in kith.audit(gallery, subject=form)] for form in (asked, stored)]
    assert lines[0] == lines[1] != []
    numbers: dict[str, Any] = {"k": [2**63, -(2**63) - 1, 1e308, 5e-324, "\u202eevil\u2066"], "": ""}
    kith.put_subject(gallery, "other", metadata=numbers)
    assert kith.subject(gallery, "other").metadata == numbers
    kith.merge_subject(gallery, "other", asked)
    assert kith.update_subject(gallery, asked, tags=[stored, "x"]).tags == [NFC, "x"]
    assert kith.subject(gallery, asked).id == kith.put_subject(gallery, asked).id == NFC
    assert KeyIn(name=stored, scopes=["read"]).name == WebhookIn(url="https://a.example", name=stored).name == NFC
    erased = kith.delete_subject(gallery, asked)
    assert ids(kith, gallery) == []
    assert erased.receipt.id in [each.id for each in kith.erasures(gallery, stored)]


def test_imports(kith: Kith, gallery: str, tmp_path: Path) -> None:
    first = {"subject": NFD, "name": NFD, "tags": [NFD], "metadata": {NFD: NFD}}
    others = ({"subject": name} for name in (PERSIAN, "\U0001fae9", "a\u202eb", NFC))
    report = imported(kith, gallery, tmp_path, first, *others)
    assert report.refused_count == 1
    assert sorted(ids(kith, gallery)) == sorted([NFC, PERSIAN, "\U0001fae9"])
    stored = kith.subject(gallery, NFC)
    assert (stored.name, stored.tags, stored.metadata) == (NFC, [NFC], {NFC: NFC})
