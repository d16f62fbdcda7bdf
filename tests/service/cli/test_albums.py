"""``kith album``: from a folder of photos to people with names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kith import Kith
from tests.service.cli.conftest import Program, written
from tests.service.usecases.test_albums import people

__all__ = ["people"]


def test_photos_become_people_with_names(
    run: Program, kith: Kith, gallery: str, people: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.usecases.albums.MAX_ENROLLED", 3)  # the command goes on

    def album(*words: str | Path, status: int = 0) -> Any:
        return json.loads(run("album", *words, "-g", gallery, "--json", status=status))

    few = {"actor.jpg": people["2024/actor-0.jpg"], "text.jpg": b"no photo", "notes.txt": b"notes"}
    written(run.folder / "few", few)
    (run.folder / "few" / "gone.jpg").symlink_to("nowhere")
    made = album("create", "few", status=1)
    assert {name: reason.partition(":")[0] for name, reason in made["refused"].items()} == {
        "few/gone.jpg": "not a file, or a link to a missing file",
        "text.jpg": "image_format",
    }
    assert "receipt" in run("album", "delete", made["id"], "-g", gallery, "--yes")
    written(run.folder / "photos", people)
    text = run("album", "create", "photos", "-g", gallery, "--risk", "0.02")
    (listed,) = album("list")
    assert (listed["state"], listed["group_count"]) == ("ready", 2)
    whole = listed["id"]
    shown = run("album", "show", whole, "-g", gallery)
    assert f"kith album enroll {whole} g1=ada -g {gallery}" in text
    for said in ("2024/astronaut-", "8 photos, 8 faces: 2 groups, 0 single faces", "about 2.00% of the pairs"):
        assert said in text and said in shown
    first, second = album("show", whole)["groups"]
    assert album("merge", whole, second["id"], "--into", first["id"])["face_count"] == 8
    apart = album("split", whole, first["id"], *(face["id"] for face in second["faces"]))
    results = album("enroll", whole, f"{first['id']}=ada", f"{apart['id']} = ada", status=1)
    assert [(result["enrolled_count"], len(result["refused"])) for result in results] == [(4, 0), (0, 4)]
    (allowed,) = album("enroll", whole, f"{apart['id']}=ada", "--allow-inconsistent")
    assert allowed["enrolled_count"] == kith.subject(gallery, "ada").template_count - 4 == 4
    for wrong in ("g1", "=ada", "g1="):
        run("album", "enroll", whole, wrong, "-g", gallery, status=2)
    (run.folder / "empty").mkdir()
    run("album", "create", "empty", "-g", gallery, status=2)
    assert "no photos" in run.stderr
