"""``kith album`` on real photos: the people, resumption, names, enrollment."""

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


def album(*words: str | Path, cwd: Path, status: int = 0, text: bool = False, url: str = "") -> Any:
    """Run a command on albums of a server, by default on those of the local database below ``cwd``."""
    options = [*(["--url", url] if url else []), *([] if text else ["--json"])]
    done = run_kith("album", *map(str, words), *options, cwd=cwd, environment=ENVIRONMENT)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if text else json.loads(done.stdout)


def shown(document: dict[str, Any]) -> Counter[tuple[str, ...]]:
    """Return the photos of each group of several faces."""
    several = (group["faces"] for group in document["groups"] if group["face_count"] > 1)
    return Counter(tuple(sorted(face["photo"] for face in faces)) for faces in several)


EXPECTED = Counter(
    {
        tuple(f"2024/astronaut-{n}.jpg" for n in range(4)): 1,
        tuple(f"2024/actor-{n}.jpg" for n in range(4)): 1,
        ("group-0.jpg", "group-1.jpg"): 5,  # the sixth face is turned away
    }
)


def test_each_person_is_one_group_in_the_local_database(photos: Path, tmp_path: Path) -> None:
    made = album("create", photos, "-g", "family", cwd=tmp_path)
    counts = {name: made[name] for name in made if name.endswith("_count") or name in ("refused", "risk")}
    assert counts == {
        "photo_count": 11,
        "face_count": 20,
        "group_count": 7,
        "single_count": 2,
        "refused": {},
        "risk": 0.01,
    }
    assert shown(album("show", made["id"], "-g", "family", cwd=tmp_path)) == EXPECTED
    (listed,) = album("list", "-g", "family", cwd=tmp_path)
    assert (listed["id"], listed["state"], listed["group_count"]) == (made["id"], "ready", 7)
    text = album("show", made["id"], "-g", "family", cwd=tmp_path, text=True)
    assert "2024/astronaut-" in text
    assert "11 photos, 20 faces: 7 groups, 2 single faces" in text
    assert "about 1.00% of the pairs" in text


def test_named_groups_are_enrolled_and_recognized(photos: Path, server: str, kith: Kith, tmp_path: Path) -> None:
    try:
        text = album("create", photos, "-g", "album", "--risk", "0.02", cwd=tmp_path, text=True, url=server)
        assert "about 2.00% of the pairs" in text
        (made,) = kith.albums("album")
        assert f"kith album enroll {made.id} g1=ada -g album" in text
        groups = {group.faces[0].photo.partition("-")[0]: group.id for group in kith.album_groups("album", made.id)}
        astronaut, actor, friend = (groups[name] for name in ("2024/astronaut", "2024/actor", "group"))
        names = (f"{astronaut}=collins", f"{friend} = collins", f"{actor}=hanks")
        results = album("enroll", made.id, *names, "-g", "album", cwd=tmp_path, status=1, url=server)
        enrolled = {result["group"]: (result["enrolled_count"], len(result["refused"])) for result in results}
        assert enrolled == {astronaut: (4, 0), friend: (0, 2), actor: (4, 0)}
        assert kith.subject("album", "hanks").template_count == 4
        (result,) = kith.identify("album", photos / "2024" / "actor-1.jpg", faces="largest").results
        assert result.subject == "hanks"
        assert kith.album("album", made.id).face_count == 20 - 8
        (allowed,) = album(
            "enroll", made.id, f"{friend}=collins", "--allow-inconsistent", "-g", "album", cwd=tmp_path, url=server
        )
        assert allowed["enrolled_count"] == 2
        for wrong in ("g1", "=ada", "g1="):
            album("enroll", made.id, wrong, "-g", "album", cwd=tmp_path, status=2, text=True, url=server)
    finally:
        kith.delete_gallery("album")


@pytest.mark.long
def test_an_interrupted_album_is_resumed_by_its_job(photos: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command and its service; the next service on the database goes on with the job."""
    command = [sys.executable, "-m", "service.cli.main", "album", "create", str(photos), "-g", "g", "--detail", "high"]
    environment = ENVIRONMENT | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "KITH_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not running_jobs(tmp_path / "data" / "kith.db"):
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    assert process.returncode in (0, 130)
    done = run_kith("jobs", "list", "--json", cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)
    watched = run_kith("jobs", "watch", job["id"], cwd=tmp_path, environment=ENVIRONMENT)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert shown(album("show", job["id"], "-g", "g", cwd=tmp_path)) == EXPECTED


def running_jobs(path: Path) -> int:
    if not path.is_file():
        return 0
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        (count,) = database.execute("SELECT count(*) FROM jobs WHERE state = 'running'").fetchone()
        return int(count)
    except sqlite3.OperationalError:  # not created yet, or locked
        return 0
    finally:
        database.close()


def test_unusable_files_are_refused_with_their_reason(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "2024", tmp_path / "photos")
    (tmp_path / "photos" / "text.jpg").write_bytes(b"no photo")
    (tmp_path / "photos" / "gone.jpg").symlink_to("nowhere")
    (tmp_path / "photos" / "notes.txt").write_text("notes")
    made = album("create", "photos", "-g", "g", cwd=tmp_path, status=1)
    assert {name.rpartition("/")[2]: reason.partition(":")[0] for name, reason in made["refused"].items()} == {
        "gone.jpg": "not a file, or a link to a missing file",
        "text.jpg": "image_format",
    }
    assert made["group_count"] == 2
    first, second, *_ = album("show", made["id"], "-g", "g", cwd=tmp_path)["groups"]
    merged = album("merge", made["id"], second["id"], "--into", first["id"], "-g", "g", cwd=tmp_path)
    assert (merged["id"], merged["face_count"]) == (first["id"], first["face_count"] + second["face_count"])
    faces = [face["id"] for face in second["faces"]]
    assert album("split", made["id"], first["id"], *faces, "-g", "g", cwd=tmp_path)["face_count"] == len(faces)
    assert "receipt" in album("delete", made["id"], "-g", "g", "--yes", cwd=tmp_path, text=True)
    assert album("list", "-g", "g", cwd=tmp_path) == []
    (tmp_path / "empty").mkdir()
    assert "no photos" in run_kith("album", "create", "empty", "-g", "g", cwd=tmp_path, environment=ENVIRONMENT).stderr


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
    made = album("create", "photos", "-g", "lfw", cwd=tmp_path)
    document = album("show", made["id"], "-g", "lfw", cwd=tmp_path)
    names = [[f["photo"].rpartition("_")[0] for f in g["faces"]] for g in document["groups"] if g["face_count"] > 1]
    largest = sorted(names, key=len, reverse=True)[:6]
    assert {Counter(each).most_common(1)[0][0] for each in largest} == {folder.name for folder in several}
    right = sum(n * (n - 1) // 2 for each in largest for n in Counter(each).values())
    pairs = sum(len(each) * (len(each) - 1) // 2 for each in largest)
    assert right >= 0.97 * pairs
    assert right >= 0.85 * 6 * 28
