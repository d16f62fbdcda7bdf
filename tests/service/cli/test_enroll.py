"""``kith enroll`` accounts for every file of a folder, with a server and without one."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from service.cli.commands.enroll import EnrollmentReport, print_report
from tests.conftest import jpeg
from tests.service.cli.conftest import Program

LATIN1 = os.fsdecode(b"Ren\xe9")


def written(folder: Path, files: dict[str, bytes]) -> None:
    for name, payload in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(payload)


@pytest.mark.parametrize("where", ["run", "local"])
def test_every_file_is_accounted_for(
    request: pytest.FixtureRequest, gallery: str, tmp_path: Path, astronaut: NDArray[np.uint8], where: str
) -> None:
    photo, run = jpeg(astronaut), request.getfixturevalue(where)
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
    written(tmp_path / "people", files)
    (tmp_path / "people" / "eileen" / "gone.jpg").symlink_to("nowhere")
    words = ("enroll", "people", "-g", gallery, "--report", "report.csv")
    printed = run(*words, status=1)
    assert "3 photos enrolled, 3 refused; 5 files ignored (hidden, or not a photo)" in printed
    assert "Ignored: people/eileen/[b]notes.txt\n" in printed
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
    again = json.loads(run(*words, "--json", status=1))
    assert (again["already_enrolled_count"], len(again["refused"]), again["ignored_count"]) == (3, 3, 5)
    assert again["ignored_files"] == ["people/Ren\\xe9/notes.txt", "people/eileen/[b]notes.txt"]


def test_a_source_without_folders_of_people_is_refused(run: Program, photos: dict[str, Path]) -> None:
    written(run.folder / "flat", {".git/config": b"", "1.jpg": b"photo"})
    run("enroll", "flat", "-g", "none", status=2)
    assert "has no folder per person" in run.stderr
    run("enroll", photos["tom"].name, "-g", "none", status=2)
    assert "kith subject enroll ID tom.jpg -g none" in " ".join(run.stderr.replace("│", " ").split())


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


def test_people_without_a_photo_are_named_first(run: Program, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    gray, people = jpeg(np.full_like(astronaut, 128)), run.folder / "people"
    written(people, {"eileen/1.jpg": jpeg(astronaut), "anna/1.jpg": gray})
    first, *_, last = run("enroll", "people", "-g", gallery, status=1).splitlines()
    assert first == "1 person has no photo in the gallery, and cannot be found: anna"
    assert last == "1 photo enrolled, 1 refused"
    # A person who was enrolled before is not missing because of another, refused photo.
    (people / "eileen" / "1.jpg").write_bytes(gray + b"2")
    again = json.loads(run("enroll", "people", "-g", gallery, "--json", status=1))
    assert (again["without_photo"], len(again["refused"])) == (["anna"], 2)
