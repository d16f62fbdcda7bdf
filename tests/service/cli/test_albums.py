"""``kith album`` on real photos: the people, resumption, names, enrollment."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kith import Kith
from tests.service.cli.conftest import Program
from tests.service.usecases.test_albums import album_photos, are_people

__all__ = ["album_photos"]


@pytest.fixture
def folder(tmp_path: Path, album_photos: dict[str, bytes]) -> Path:
    """Photos, and files that are none."""
    files = album_photos | {"text.jpg": b"no photo", "notes.txt": b"notes"}
    for name in ("blurred.jpg", "zz-copy.jpg"):
        del files[name]
    for name, content in files.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(content)
    (tmp_path / "photos" / "gone.jpg").symlink_to("nowhere")
    return tmp_path / "photos"


def album(run: Program, *words: str | Path, gallery: str = "g", status: int = 0) -> Any:
    return json.loads(run("album", *words, "-g", gallery, "--json", status=status))


def shows_people(document: dict[str, Any]) -> bool:
    several = (group["faces"] for group in document["groups"] if group["face_count"] > 1)
    return are_people([face["photo"] for face in faces] for faces in several)


def test_people_are_grouped_in_the_local_database(local: Program, folder: Path) -> None:
    made = album(local, "create", folder, status=1)
    assert {name.rpartition("/")[2]: reason.partition(":")[0] for name, reason in made["refused"].items()} == {
        "gone.jpg": "not a file, or a link to a missing file",
        "text.jpg": "image_format",
    }
    assert [made[name] for name in ("photo_count", "face_count", "group_count", "single_count", "risk")] == [
        *(11, 20, 7, 2),
        0.01,
    ]
    document = album(local, "show", made["id"])
    assert shows_people(document)
    (listed,) = album(local, "list")
    assert (listed["id"], listed["state"], listed["group_count"]) == (made["id"], "ready", 7)
    text = local("album", "show", made["id"], "-g", "g")
    for said in ("2024/astronaut-", "11 photos, 20 faces: 7 groups, 2 single faces", "about 1.00% of the pairs"):
        assert said in text
    first, second, *_ = document["groups"]
    merged = album(local, "merge", made["id"], second["id"], "--into", first["id"])
    assert (merged["id"], merged["face_count"]) == (first["id"], first["face_count"] + second["face_count"])
    faces = [face["id"] for face in second["faces"]]
    assert album(local, "split", made["id"], first["id"], *faces)["face_count"] == len(faces)
    assert "receipt" in local("album", "delete", made["id"], "-g", "g", "--yes")
    assert album(local, "list") == []
    (local.folder / "empty").mkdir()
    local("album", "create", "empty", "-g", "g", status=2)
    assert "no photos" in local.stderr


def test_named_groups_are_enrolled_and_recognized(
    run: Program, kith: Kith, gallery: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.usecases.albums.MAX_ENROLLED", 3)  # the command goes on
    text = run("album", "create", folder, "-g", gallery, "--risk", "0.02", status=1)
    assert "about 2.00% of the pairs" in text
    (made,) = kith.albums(gallery)
    assert f"kith album enroll {made.id} g1=ada -g {gallery}" in text
    groups = {group.faces[0].photo.partition("-")[0]: group.id for group in kith.album_groups(gallery, made.id)}
    astronaut, actor, friend = (groups[name] for name in ("2024/astronaut", "2024/actor", "group"))
    names = (f"{astronaut}=collins", f"{friend} = collins", f"{actor}=hanks")
    results = album(run, "enroll", made.id, *names, gallery=gallery, status=1)
    enrolled = {result["group"]: (result["enrolled_count"], len(result["refused"])) for result in results}
    assert enrolled == {astronaut: (4, 0), friend: (0, 2), actor: (4, 0)}
    (result,) = kith.identify(gallery, folder / "2024" / "actor-1.jpg", faces="largest").results
    assert result.subject == "hanks"
    (allowed,) = album(run, "enroll", made.id, f"{friend}=collins", "--allow-inconsistent", gallery=gallery)
    assert allowed["enrolled_count"] == 2
    for wrong in ("g1", "=ada", "g1="):
        run("album", "enroll", made.id, wrong, "-g", gallery, status=2)


def test_people_of_lfw_are_grouped_at_the_risk(data: Path, local: Program) -> None:
    """Six people with eight photos and forty with one: nearly all pairs are found, and none is wrong."""
    folders = sorted(path for path in (data / "lfw" / "images").iterdir() if path.is_dir())
    several = [folder for folder in folders if len(list(folder.iterdir())) >= 8][5:11]
    single = [folder for folder in folders if len(list(folder.iterdir())) == 1][100:140]
    (local.folder / "photos").mkdir()
    for folder in (*several, *single):
        for path in sorted(folder.iterdir())[:8]:
            shutil.copy(path, local.folder / "photos")
    document = album(local, "show", album(local, "create", "photos")["id"])
    names = [[f["photo"].rpartition("_")[0] for f in g["faces"]] for g in document["groups"] if g["face_count"] > 1]
    largest = sorted(names, key=len, reverse=True)[:6]
    assert {Counter(each).most_common(1)[0][0] for each in largest} == {folder.name for folder in several}
    right = sum(n * (n - 1) // 2 for each in largest for n in Counter(each).values())
    pairs = sum(len(each) * (len(each) - 1) // 2 for each in largest)
    assert right >= 0.97 * pairs
    assert right >= 0.85 * 6 * 28
