"""``kith enroll`` accounts for every file of a folder, with a server and without one."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from service.cli.commands.enroll import EnrollmentReport, print_report
from tests.commands import run_kith
from tests.conftest import jpeg

LATIN1 = os.fsdecode(b"Ren\xe9")


@pytest.fixture
def people(tmp_path: Path, astronaut: NDArray[np.uint8]) -> Path:
    folder, photo = tmp_path / "people", jpeg(astronaut)
    files = {
        "eileen/1.jpe": photo,
        "eileen/2019/IMG_2": photo + b"2",
        f"eileen/{LATIN1}.jpg": photo + b"3",
        f"{LATIN1}/1.jpg": photo,
        f"{LATIN1}/notes.txt": b"no photo",
        "eileen/[b]notes.txt": b"no photo",
        "eileen/._1.jpg": b"\0\5\x16\7",
        "eileen/.ipynb_checkpoints/1.jpg": photo,
        "__MACOSX/eileen/1.jpg": photo,
        "group.jpg": photo,
    }
    for name, payload in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(payload)
    (folder / "eileen" / "gone.jpg").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize("embedded", [False, True])
def test_every_file_is_accounted_for(
    kith: Kith, server: str, gallery: str, people: Path, tmp_path: Path, embedded: bool
) -> None:
    where = {} if embedded else {"KITH_URL": server}
    environment = {"KITH_LOG_LEVEL": "WARNING", "HOME": str(tmp_path), **where}
    words = ("enroll", "people", "-g", gallery, "--report", "report.csv")
    done = run_kith(*words, cwd=tmp_path, environment=environment)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "3 photos enrolled, 3 refused; 5 files ignored (hidden, or not a photo)" in done.stdout
    assert "Ignored: people/eileen/[b]notes.txt\n" in done.stdout
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row["photo"]: (row["status"], row["code"]) for row in csv.DictReader(stream)}
    assert rows == {
        "people/Ren\\xe9/notes.txt": ("ignored", ""),
        "people/eileen/[b]notes.txt": ("ignored", ""),
        "people/eileen/gone.jpg": ("refused", "unreadable"),
        "people/group.jpg": ("refused", "invalid_request"),
        "people/Ren\\xe9/1.jpg": ("refused", "invalid_request"),
        "people/eileen/1.jpe": ("done", ""),
        "people/eileen/2019/IMG_2": ("done", ""),
        "people/eileen/Ren\\xe9.jpg": ("done", ""),
    }
    again = json.loads(run_kith(*words, "--json", cwd=tmp_path, environment=environment).stdout)
    assert (again["already_enrolled_count"], len(again["refused"]), again["ignored_count"]) == (3, 3, 5)
    assert again["ignored_files"] == ["people/Ren\\xe9/notes.txt", "people/eileen/[b]notes.txt"]


def test_a_folder_with_a_hidden_folder_only_is_refused(tmp_path: Path, server: str) -> None:
    (tmp_path / "flat" / ".git").mkdir(parents=True)
    (tmp_path / "flat" / "1.jpg").write_bytes(b"photo")
    done = run_kith("enroll", "flat", "-g", "none", cwd=tmp_path, environment={"KITH_URL": server})
    assert (done.returncode, "has no folder per person" in done.stderr) == (2, True)


def test_a_photo_is_no_source_and_the_command_for_one_is_named(
    tmp_path: Path, astronaut: NDArray[np.uint8], server: str
) -> None:
    (tmp_path / "party.jpg").write_bytes(jpeg(astronaut))
    done = run_kith("enroll", "party.jpg", "-g", "none", cwd=tmp_path, environment={"KITH_URL": server})
    assert done.returncode == 2
    assert "kith subject enroll ID party.jpg -g none" in " ".join(done.stderr.replace("│", " ").split())


def test_ten_refusals_are_printed_and_the_summary_is_last(capsys: pytest.CaptureFixture[str]) -> None:
    report = EnrollmentReport(enrolled=3)
    for number in range(12):
        report.add(f"people/{'a' * 90}/{number}.jpg", "refused", "no face was found", "no_face")
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert sum("no face was found" in line for line in lines) == 10
    assert lines[0] == f"Refused: people/{'a' * 90}/0.jpg: no_face: no face was found"
    assert "Refused: 2 more. List all with --report FILE." in lines
    assert lines[-1] == "3 photos enrolled, 12 refused"


def test_people_without_a_photo_are_named_first(
    tmp_path: Path, astronaut: NDArray[np.uint8], server: str, gallery: str
) -> None:
    for name, photo in (("eileen/1.jpg", astronaut), ("anna/1.jpg", np.full_like(astronaut, 128))):
        (tmp_path / "people" / name).parent.mkdir(parents=True)
        (tmp_path / "people" / name).write_bytes(jpeg(photo))
    environment = {"KITH_URL": server}
    done = run_kith("enroll", "people", "-g", gallery, cwd=tmp_path, environment=environment)
    first, *_, last = done.stdout.splitlines()
    assert first == "1 person has no photo in the gallery, and cannot be found: anna"
    assert last == "1 photo enrolled, 1 refused"
    # A person who was enrolled before is not missing because of another, refused photo.
    (tmp_path / "people" / "eileen" / "2.jpg").write_bytes(jpeg(np.full_like(astronaut, 90)))
    (tmp_path / "people" / "eileen" / "1.jpg").unlink()
    again = json.loads(
        run_kith("enroll", "people", "-g", gallery, "--json", cwd=tmp_path, environment=environment).stdout
    )
    assert (again["without_photo"], len(again["refused"])) == (["anna"], 2)
