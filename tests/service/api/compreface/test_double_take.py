"""The requests of Double Take: train, recognize, remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.service.api.compreface.conftest import CompatServer

MATCH, UNKNOWN = 60, 40
"""Double Take's default confidences, in percent."""


@pytest.fixture
def headers(compat: CompatServer) -> dict[str, str]:
    return {"x-api-key": compat.create_key(compat.create_gallery())}


def _matches(response: httpx.Response) -> list[tuple[str, bool]]:
    """Return name and match of each face, as Double Take computes them."""
    data: dict[str, Any] = response.json()
    if data.get("code") == 28:
        return []
    matches = []
    for result in data["result"]:
        face = result["subjects"][0] if result["subjects"] else None
        confidence = round(face["similarity"] * 100, 2) if face else 0
        name = face["subject"].lower() if face and confidence >= UNKNOWN else "unknown"
        assert result["box"]["x_max"] > result["box"]["x_min"]
        matches.append((name, confidence >= MATCH))
    return matches


def test_train_recognize_and_remove(compat: CompatServer, headers: dict[str, str], photos: Path) -> None:
    faces, recognize = f"{compat.url}/api/v1/recognition/faces", f"{compat.url}/api/v1/recognition/recognize"

    def send(url: str, name: str, **params: Any) -> httpx.Response:
        file = {"file": (f"{name}.jpg", (photos / f"{name}.jpg").read_bytes(), "image/jpeg")}
        return httpx.post(url, headers=headers, params=params, files=file, timeout=60)

    untrained = _matches(send(recognize, "astronaut", det_prob_threshold=0.8))
    assert untrained == [("unknown", False)]
    assert send(faces, "astronaut", subject="Ada").status_code == 201
    assert _matches(send(recognize, "astronaut2", det_prob_threshold=0.8)) == [("ada", True)]
    assert _matches(send(recognize, "actor", det_prob_threshold=0.8)) == [("unknown", False)]
    group = _matches(send(recognize, "group", det_prob_threshold=0.8))
    assert group == [("unknown", False)] * len(group)
    assert _matches(send(recognize, "nobody", det_prob_threshold=0.8)) == []
    removed = httpx.delete(faces, headers=headers, params={"subject": "Ada"}, timeout=60)
    assert removed.json() == {"deleted": 1}
    assert _matches(send(recognize, "astronaut2", det_prob_threshold=0.8)) == [("unknown", False)]
