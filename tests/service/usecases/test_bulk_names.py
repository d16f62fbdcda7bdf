"""A folder name that cannot be a subject's id costs its own photos only."""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kith import Kith
from kith.wire.jobs import JobOut
from tests.conftest import jpeg
from tests.refusals import refusal
from tests.service.cli.conftest import Program
from tests.service.inference.test_archive_names import zip_of
from tests.service.usecases.test_bulk_enrollment import Bytes, as_tar, as_zip


def enrolled(kith: Kith, gallery: str, payload: bytes, **options: Any) -> tuple[JobOut, dict[str, str]]:
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(payload), **options).id, 60)
    return job, {item.item: item.outcome for item in kith.job_items(job.id)}


def test_names_of_a_zip(kith: Kith, gallery: str, tmp_path: Path, server: str) -> None:
    names = zip_of(
        ("José/1.jpg".encode(), True),
        ("表/1.jpg".encode("cp932"), False),
        ("ada\\表.jpg".encode("cp932"), False),
        ("Ren\ufffd/1.jpg".encode(), True),
    )
    (tmp_path / "people.zip").write_bytes(names)
    job, outcomes = enrolled(kith, gallery, names)
    assert (job.state, outcomes) == ("failed", {})
    assert job.problem is not None and job.problem.code == "archive_invalid"
    assert "/1.jpg' is not UTF-8" in job.problem.detail
    assert "cp932 for Japanese" in job.problem.remedy
    # The content is no photo: a name that is accepted is refused for that later.
    expected = dict.fromkeys(("José/1.jpg", "表/1.jpg", "ada/表.jpg"), "image_format") | {
        "Ren\ufffd/1.jpg": "invalid_request"
    }
    assert enrolled(kith, gallery, names, names="cp932")[1] == expected
    run = Program(tmp_path, server)
    run("enroll", "people.zip", "-g", gallery, status=3)
    assert "kith enroll --names" in run.stderr
    done = json.loads(run("enroll", "people.zip", "-g", gallery, "--json", "--names", "Shift-JIS", status=1))
    assert {row["photo"] for row in done["refused"]} == set(expected)
    assert refusal(kith.enroll_archive, gallery, Bytes(names), names="punycode") == (422, "invalid_request")


def test_a_manifest_whose_files_are_not_found_for_their_encoding(kith: Kith, gallery: str) -> None:
    """A manifest is UTF-8, and names files as they are read."""
    buffer, files = io.BytesIO(), {"manifest.csv": "file,subject\n王伟.jpg,eileen\n".encode(), "王伟.jpg": b"photo"}
    with tarfile.open(fileobj=buffer, mode="w", encoding="gbk", format=tarfile.GNU_FORMAT) as archive:
        for name, payload in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    sent = buffer.getvalue()
    job, _ = enrolled(kith, gallery, sent)
    assert job.problem is not None
    assert "is not UTF-8" in job.problem.detail
    job, _ = enrolled(kith, gallery, sent, names="gbk")
    assert {item.item: (item.outcome, item.subject) for item in kith.job_items(job.id)} == {
        "王伟.jpg": ("image_format", "eileen")
    }


def test_other_files_are_named_and_photos_are_known_by_content(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    photo = jpeg(astronaut)
    files = {
        "eileen/1.jfif": photo,
        "eileen/2.jpe": photo + b"2",
        "eileen/IMG_3": photo + b"3",
        "eileen/notes.txt": b"no photo",
        "eileen/._1.jpg": b"\0\5\x16\7",
        "__MACOSX/eileen/1.jpg": photo,
    }
    job, outcomes = enrolled(kith, gallery, as_zip(files))
    names = ["eileen/1.jfif", "eileen/2.jpe", "eileen/IMG_3"]
    assert outcomes == dict.fromkeys(names, "enrolled") | {"eileen/notes.txt": "ignored"}
    assert (job.total_count, job.done_count, job.failed_count, job.details) == (4, 4, 0, {"ignored": 3})
    again, outcomes = enrolled(kith, gallery, as_tar(files))
    assert outcomes == dict.fromkeys(names, "already_enrolled") | {"eileen/notes.txt": "ignored"}
    # An erased subject's name is in no list.
    kith.delete_subject(gallery, "eileen")
    assert {(item.item, item.outcome) for item in kith.job_items(again.id)} == {("", "")}
    # A manifest may name any file.
    manifest = {"manifest.csv": b"file,subject\na.dat,eileen\nb.dat,eileen\n", "a.dat": photo, "b.dat": b"x"}
    assert enrolled(kith, gallery, as_tar(manifest))[1] == {"a.dat": "enrolled", "b.dat": "image_format"}


def test_a_name_of_many_combining_marks_costs_no_time(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    """Normalization takes quadratic time for marks in descending order."""
    name = "a" + "\u0315\u0300" * 20_000
    files = {f"{name}/{number}.jpg": b"photo" for number in range(12)} | {"eileen/1.jpg": jpeg(astronaut)}
    started = time.monotonic()
    job, outcomes = enrolled(kith, gallery, as_tar(files))
    assert (job.state, sorted(outcomes.values())) == ("succeeded", ["enrolled", *["invalid_request"] * 12])
    assert time.monotonic() - started < 30  # normalization would take a minute
