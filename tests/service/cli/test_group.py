"""``kith group`` on real photos: the people, resumption after a kill, new photos, names, enrollment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from service.cli.tools.album_names import AlbumError, people_of, read_groups, read_names
from service.cli.tools.album_pictures import GRAY, cut
from service.cli.tools.demo import alter
from tests.commands import run_kith
from tests.conftest import ROOT

ENVIRONMENT = {"KITH_LOG_LEVEL": "WARNING", "KITH_RUNTIME": "onnxruntime"}


@pytest.fixture(scope="module")
def photos(
    tmp_path_factory: pytest.TempPathFactory,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    group: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
) -> Path:
    """Four photos of each of two people, two of a group of six, and one without a face."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "2024").mkdir()
    for (name, image), (number, (turn, light)) in product(
        (("astronaut", astronaut), ("actor", actor)), enumerate(product((0, 6), (0.8, 1.2)))
    ):
        content = alter(Image.fromarray(image), mirror=number % 2 == 1, turn_deg=turn, scale=0.8, light=light, jpeg=85)
        (folder / "2024" / f"{name}-{number}.jpg").write_bytes(content)
    for number, scale in enumerate((0.9, 0.7)):
        content = alter(Image.fromarray(group), mirror=False, turn_deg=0, scale=scale, light=1.0, jpeg=90)
        (folder / f"group-{number}.jpg").write_bytes(content)
    (folder / "coffee.jpg").write_bytes(alter(Image.fromarray(nobody), False, 0, 0.5, 1.0, 85))
    return folder


def grouped(photos: Path, album: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """Run the command, and return its answer with the content of the groups file as ``document``."""
    environment = ENVIRONMENT | {"HOME": str(album.parent)}
    done = run_kith("group", str(photos), str(album), "--json", *options, cwd=album.parent, environment=environment)
    assert done.returncode == status, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"document": read_groups(album)}


def members(answer: dict[str, Any]) -> dict[str, list[str]]:
    """Return the faces of each group."""
    return {group["id"]: sorted(face["face"] for face in group["faces"]) for group in answer["document"]["groups"]}


def shown(answer: dict[str, Any]) -> Counter[tuple[str, ...]]:
    """Return the photos of each group."""
    return Counter(tuple(sorted(f["photo"] for f in group["faces"])) for group in answer["document"]["groups"])


@pytest.fixture(scope="module")
def album(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("albums") / "album"
    grouped(photos, folder)
    return folder


EXPECTED = Counter(
    {
        tuple(f"2024/astronaut-{n}.jpg" for n in range(4)): 1,
        tuple(f"2024/actor-{n}.jpg" for n in range(4)): 1,
        ("group-0.jpg", "group-1.jpg"): 5,  # the sixth face is turned away
    }
)


def test_each_person_is_one_group(photos: Path, tmp_path: Path) -> None:
    answer = grouped(photos, tmp_path / "album", "--page")
    assert shown(answer) == EXPECTED
    assert {name: answer[name] for name in answer if name.endswith("_count") or name in ("refused", "risk")} == {
        "photo_count": 11,
        "new_photo_count": 11,
        "face_count": 20,
        "group_count": 7,
        "loner_count": 2,
        "low_quality_count": 2,
        "known_different_pair_count": 20,
        "refused": [],
        "risk": 0.01,
    }
    loners = sorted((each["photo"], each["reasons"]) for each in answer["document"]["loners"])
    assert loners == [("group-0.jpg", ["yaw"]), ("group-1.jpg", ["yaw"])]
    # Five faces of each group photo are usable: 2 x 10 pairs that are certainly different.
    assert [group["id"] for group in answer["document"]["groups"]] == [f"g{n}" for n in range(1, 8)]
    assert all(face["certainty"] > 0.9 for group in answer["document"]["groups"] for face in group["faces"])
    written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "album").iterdir()}
    assert written == dict.fromkeys(("faces.sqlite", "groups.json", "groups.html", "names.txt"), 0o600)
    assert (tmp_path / "album").stat().st_mode & 0o777 == 0o700
    page = (tmp_path / "album" / "groups.html").read_text()
    assert page.count("<section>") == 7
    assert page.count("data:image/jpeg;base64,") == 18


def test_the_summary_names_the_largest_groups_and_the_next_step(photos: Path, album: Path) -> None:
    words = ("group", str(photos), str(album), "--risk", "0.02")
    done = run_kith(*words, cwd=album.parent, environment=ENVIRONMENT | {"HOME": str(album.parent)})
    assert done.returncode == 0
    assert "11 photos (0 new), 20 faces, 2 of low quality: 7 groups, 2 loners" in done.stdout
    assert "about 2.00% of the pairs" in done.stdout
    assert f"kith enroll {album}" in done.stdout


def test_groups_do_not_depend_on_names_folders_and_order(photos: Path, album: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(photos.rglob("*.jpg"), reverse=True)):
        folder = tmp_path / "photos" / f"{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / f"{number:03}.jpg")
    moved, usual = grouped(tmp_path / "photos", tmp_path / "album"), grouped(photos, album)
    assert members(moved) == members(usual)


def test_new_photos_alone_are_embedded_and_groups_keep_their_ids(photos: Path, tmp_path: Path) -> None:
    some, folder = tmp_path / "photos", tmp_path / "album"
    shutil.copytree(photos, some)
    later = [some / "2024" / "astronaut-3.jpg", some / "group-1.jpg"]
    contents = [path.read_bytes() for path in later]
    for path in later:
        path.unlink()
    first = grouped(some, folder)
    assert first["new_photo_count"] == 9
    before = {face: group for group, faces in members(first).items() for face in faces}
    for path, content in zip(later, contents, strict=True):
        path.write_bytes(content)
    shutil.copy(later[0], some / "copy of astronaut.jpg")
    second = grouped(some, folder)
    assert (second["new_photo_count"], second["photo_count"]) == (2, 12)
    after = {face: group for group, faces in members(second).items() for face in faces}
    assert {face: after[face] for face in before} == before
    assert len(members(second)) == 7
    astronaut = next(g for g in second["document"]["groups"] if g["faces"][0]["photo"].startswith("2024/astronaut"))
    assert [face["copies"] for face in astronaut["faces"] if "copies" in face] == [["copy of astronaut.jpg"]]
    # Faces of a deleted photo are deleted, too.
    for path in later:
        path.unlink()
    assert grouped(some, folder)["new_photo_count"] == 0
    assert stored_photos(folder / "faces.sqlite") == 10  # the copy is left
    assert grouped(photos, folder)["new_photo_count"] == 1


def test_a_killed_run_goes_on_where_it_was(photos: Path, album: Path, tmp_path: Path) -> None:
    """The kill comes as soon as some photos, and not all, are stored."""
    folder = tmp_path / "album"
    command = [sys.executable, "-m", "service.cli.main", "group", str(photos), str(folder)]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    stored = 0
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not stored:
            stored = stored_photos(folder / "faces.sqlite")
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    stored = stored_photos(folder / "faces.sqlite", "rw")  # ends what the kill interrupted, which "ro" cannot
    assert stored
    resumed = grouped(photos, folder)
    assert resumed["new_photo_count"] == 11 - stored
    assert shown(resumed) == EXPECTED
    assert members(resumed) == members(grouped(photos, album))


def stored_photos(path: Path, mode: str = "ro") -> int:
    if not path.is_file():
        return 0
    database = sqlite3.connect(f"file:{path}?mode={mode}", uri=True)
    try:
        (count,) = database.execute("SELECT count(*) FROM photos").fetchone()
        return int(count)
    except sqlite3.OperationalError:  # not created, or locked
        return 0
    finally:
        database.close()


def test_unusable_files_are_refused_with_their_reason(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "2024", tmp_path / "photos")
    (tmp_path / "photos" / "text.jpg").write_bytes(b"no photo")
    (tmp_path / "photos" / "gone.jpg").symlink_to("nowhere")
    (tmp_path / "photos" / "notes.txt").write_text("notes")
    answer = grouped(tmp_path / "photos", tmp_path / "album", status=1)
    assert [(each["photo"], each["code"]) for each in answer["refused"]] == [
        ("gone.jpg", "unreadable"),
        ("text.jpg", "image_format"),
    ]
    assert answer["group_count"] == 2


def test_wrong_folders_are_usage_errors(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "one").mkdir()
    shutil.copy(photos / "coffee.jpg", tmp_path / "one")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "faces.sqlite").write_bytes(b"no database" * 100)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "groups.json").write_text('{"version": 99}')
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "groups.json").write_text('{"version": 1, "next_id": 2, "photos": "", "groups": [3]}')
    for source, target, text in (
        (tmp_path / "empty", tmp_path / "a", "has no photos"),
        (photos, tmp_path / "file", "is a file"),
        (tmp_path / "one", tmp_path / "b", "0 usable faces"),
        (photos, tmp_path / "damaged", "not a database"),
        (tmp_path / "one", tmp_path / "newer", "version 99"),
        (tmp_path / "one", tmp_path / "changed", "is damaged"),
    ):
        done = run_kith("group", str(source), str(target), cwd=tmp_path, environment=ENVIRONMENT)
        assert done.returncode == 2, text
        assert text in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr


def test_named_groups_are_enrolled_and_recognized(photos: Path, album: Path, server: str, kith: Kith) -> None:
    """Two groups get one name, one face another name, and one face none."""
    document = grouped(photos, album)["document"]
    by_photo = {group["faces"][0]["photo"].partition("-")[0]: group for group in document["groups"]}
    astronaut, actor, friend = (by_photo[name] for name in ("2024/astronaut", "2024/actor", "group"))
    moved, left_out = astronaut["faces"][-1]["face"], astronaut["faces"][-2]["face"]
    lines = [f"{astronaut['id']} = collins", f"{friend['id']} = bo", f"{actor['id']} =  hanks", f"{left_out} ="]
    (album / "names.txt").write_text("# who\n\n" + "\n".join(lines) + "\n")
    environment = ENVIRONMENT | {"KITH_URL": server, "HOME": str(album.parent)}
    words = ("enroll", str(album), "-g", "album", "--json")
    try:
        done = run_kith(*words, cwd=album.parent, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["enrolled_count"] == 3 + 4 + 2
        counts = {name: kith.subject("album", name).template_count for name in ("collins", "hanks", "bo")}
        assert counts == {"collins": 3, "hanks": 4, "bo": 2}
        (result,) = kith.identify("album", photos / "2024" / "actor-1.jpg", faces="largest").results
        assert result.subject == "hanks"
        again = run_kith(*words, cwd=album.parent, environment=environment)
        assert json.loads(again.stdout)["already_enrolled_count"] == 9
    finally:
        kith.delete_gallery("album")
    assert not list(album.glob("people-*"))
    names = {astronaut["id"]: "ada", actor["id"]: "ada", moved: "grace"}
    people = people_of(document, names)
    assert {person: len(faces) for person, faces in people.items()} == {"ada": 7, "grace": 1}


def test_names_that_cannot_be_read_are_usage_errors(album: Path, tmp_path: Path, server: str) -> None:
    shutil.copytree(album, tmp_path / "album")
    names = tmp_path / "album" / "names.txt"
    environment = ENVIRONMENT | {"KITH_URL": server, "HOME": str(tmp_path)}
    for content, text in (
        ("g1 ada", "line 1: expected 'ID = PERSON'"),
        ("g1 = ada\ng1 = bo", "line 2: g1 has two lines"),
        ("g1 = ../ada", "line 1: must be 1 to 128 visible characters"),
        ("g99 = ada", "names g99"),
        ("g1 =", "has no names"),
        (None, "is missing"),
    ):
        names.unlink() if content is None else names.write_text(content)
        done = run_kith("enroll", "album", "-g", "none", cwd=tmp_path, environment=environment)
        assert done.returncode == 2, text
        assert text in " ".join(done.stderr.replace("│", " ").split())
    with pytest.raises(AlbumError, match="is missing"):
        read_names(tmp_path / "album")


def test_changed_photos_are_not_enrolled_and_names_need_no_utf8(
    photos: Path, tmp_path: Path, kith: Kith, server: str
) -> None:
    some, folder = tmp_path / "photos", tmp_path / "album"
    shutil.copytree(photos / "2024", some / os.fsdecode(b"Ren\xe9"))
    document = grouped(some, folder, "--page")["document"]
    assert (folder / "groups.html").read_text().count("data:image/jpeg;base64,") == 8
    (folder / "names.txt").write_text("\n".join(f"{group['id']} = ada" for group in document["groups"][:1]))
    changed = some / document["groups"][0]["faces"][0]["photo"]
    changed.write_bytes(next(some.rglob("actor-0.jpg")).read_bytes() + b"changed")
    environment = ENVIRONMENT | {"KITH_URL": server, "HOME": str(tmp_path)}
    try:
        done = run_kith("enroll", "album", "-g", "changed", "--json", cwd=tmp_path, environment=environment)
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["enrolled_count"], len(answer["refused"])) == (1, 3, 1)
        assert "changed since it was grouped" in answer["refused"][0]["detail"]
    finally:
        kith.delete_gallery("changed")


def test_a_picture_to_enroll_shows_one_face() -> None:
    pixels = np.arange(60 * 80 * 3, dtype=np.uint8).reshape(60, 80, 3)
    picture = cut(pixels, [30, 20, 50, 40], [[48, 10, 70, 35], [0, 0, 5, 5]])
    assert picture.shape == (50, 50, 3)  # 15 pixels on each side
    assert (picture[15:35, 15:35] == pixels[20:40, 30:50]).all()
    assert (picture[5:30, 35:50] == GRAY).all()
    assert (picture[40:, :] == pixels[45:55, 15:65]).all()
    assert cut(pixels, [-5, -5, 20, 20], []).shape == (39, 39, 3)


def test_people_of_lfw_are_grouped_at_the_risk(data: Path, tmp_path: Path) -> None:
    """Six people with eight photos and forty with one: nearly all pairs are found, and none is wrong."""
    images = data / "lfw" / "images"
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    several = [folder for folder in folders if len(list(folder.iterdir())) >= 8][5:11]
    single = [folder for folder in folders if len(list(folder.iterdir())) == 1][100:140]
    (tmp_path / "photos").mkdir()
    for folder in (*several, *single):
        for path in sorted(folder.iterdir())[:8]:
            shutil.copy(path, tmp_path / "photos")
    document = grouped(tmp_path / "photos", tmp_path / "album")["document"]
    names = [[f["photo"].rpartition("_")[0] for f in group["faces"]] for group in document["groups"]]
    largest = sorted(names, key=len, reverse=True)[:6]
    assert {Counter(each).most_common(1)[0][0] for each in largest} == {folder.name for folder in several}
    right = sum(n * (n - 1) // 2 for each in largest for n in Counter(each).values())
    pairs = sum(len(each) * (len(each) - 1) // 2 for each in largest)
    assert right >= 0.97 * pairs
    assert right >= 0.85 * 6 * 28
