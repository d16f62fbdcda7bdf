"""A folder name that cannot be a subject's id costs its own photos only."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from kith.wire.jobs import JobOut
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.service.inference.test_archive_names import zip_of
from tests.service.usecases.test_bulk_enrollment import Bytes, as_tar, as_zip

LATIN1 = os.fsdecode(b"Ren\xe9")


def enrolled(kith: Kith, gallery: str, payload: bytes, **options: Any) -> tuple[JobOut, dict[str, str]]:
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(payload), **options).id, 60)
    return job, {item.item: item.outcome for item in kith.job_items(job.id)}


def tar_of(files: list[tuple[str, bytes]], encoding: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", encoding=encoding, errors="surrogateescape", **options) as archive:
        for name, payload in files:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def test_a_folder_of_a_tar_that_declares_its_names_and_is_not_utf_8(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    """As kith enroll sends a local folder."""
    names = (f"{LATIN1}/1.jpg", f"eileen/{LATIN1}.jpg", "eileen/1.jpg", f"{LATIN1}/notes.txt")
    files = [(name, jpeg(astronaut) + os.fsencode(name)) for name in names]
    job, outcomes = enrolled(kith, gallery, tar_of(files, "utf-8"))
    assert job.state == "succeeded"
    # The name of a file is of no consequence, and photos are recognized by content.
    assert outcomes == {
        "Ren\\xe9/1.jpg": "invalid_request",
        "Ren\\xe9/notes.txt": "invalid_request",
        "eileen/Ren\\xe9.jpg": "enrolled",
        "eileen/1.jpg": "enrolled",
    }
    (refused, _) = kith.job_items(job.id, failed=True)
    assert refused.problem is not None
    assert "not UTF-8" in refused.problem.detail
    assert [(subject.id, subject.template_count) for subject in kith.subjects(gallery)] == [("eileen", 2)]


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
    assert job.problem is not None
    assert job.problem.code == "archive_invalid"
    assert "/1.jpg' is not UTF-8" in job.problem.detail
    assert "cp932 for Japanese" in job.problem.remedy
    # The content is no photo: a name that is accepted is refused for that later.
    expected = {
        "José/1.jpg": "image_format",
        "表/1.jpg": "image_format",
        "ada/表.jpg": "image_format",
        "Ren\ufffd/1.jpg": "invalid_request",
    }
    assert enrolled(kith, gallery, names, names="cp932")[1] == expected
    environment = {"KITH_URL": server}
    words = ("enroll", "people.zip", "-g", gallery, "--json")
    done = run_kith(*words, cwd=tmp_path, environment=environment)
    assert (done.returncode, "kith enroll --names" in done.stderr) == (3, True)
    done = run_kith(*words, "--names", "Shift-JIS", cwd=tmp_path, environment=environment)
    assert {row["photo"] for row in json.loads(done.stdout)["refused"]} == set(expected)
    with pytest.raises(KithClientError, match="names") as raised:
        kith.enroll_archive(gallery, Bytes(names), names="punycode")
    assert raised.value.status == 422


def test_a_manifest_whose_files_are_not_found_for_their_encoding(kith: Kith, gallery: str) -> None:
    """A manifest is UTF-8, and names files as they are read."""
    manifest = "file,subject\n王伟.jpg,eileen\n".encode()
    sent = tar_of([("manifest.csv", manifest), ("王伟.jpg", b"photo")], "gbk", format=tarfile.GNU_FORMAT)
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


def test_a_manifest_may_name_any_file(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    manifest = b"file,subject\na.dat,eileen\nb.dat,eileen\n"
    _, outcomes = enrolled(kith, gallery, as_tar({"manifest.csv": manifest, "a.dat": jpeg(astronaut), "b.dat": b"x"}))
    assert outcomes == {"a.dat": "enrolled", "b.dat": "image_format"}


def test_decomposed_names_of_macos_are_the_typed_ones(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    photo, folder = jpeg(astronaut), unicodedata.normalize("NFD", "José")
    assert folder != "José"
    enrolled(kith, gallery, as_tar({f"{folder}/1.jpg": photo}))
    assert len(list(kith.templates(gallery, "José"))) == 1
    manifest = f"file,subject\nphotos/José.jpg,{folder}\n".encode()
    _, outcomes = enrolled(
        kith, gallery, as_tar({"manifest.csv": manifest, f"photos/{folder}.jpg": photo + b"2", "José/1.jpg": photo})
    )
    assert outcomes == {f"photos/{folder}.jpg": "enrolled", "José/1.jpg": "ignored"}
    assert [(subject.id, subject.template_count) for subject in kith.subjects(gallery)] == [("José", 2)]


def test_a_name_of_many_combining_marks_costs_no_time(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    """Normalization takes quadratic time for marks in descending order."""
    name = "a" + "\u0315\u0300" * 20_000
    files = {f"{name}/{number}.jpg": b"photo" for number in range(12)} | {"eileen/1.jpg": jpeg(astronaut)}
    started = time.monotonic()
    job, outcomes = enrolled(kith, gallery, as_tar(files))
    assert (job.state, sorted(outcomes.values())) == ("succeeded", ["enrolled", *["invalid_request"] * 12])
    assert time.monotonic() - started < 30  # normalization would take a minute
