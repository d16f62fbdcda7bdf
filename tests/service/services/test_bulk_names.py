"""A folder name that cannot be a subject's id costs its own photos only."""

from __future__ import annotations

import io
import zipfile

import numpy as np
from numpy.typing import NDArray

from kith import Kith
from kith.wire.jobs import JobOut
from tests.conftest import jpeg
from tests.service.services.test_bulk_enrollment import Bytes, as_tar


def enrolled(kith: Kith, gallery: str, payload: bytes) -> tuple[JobOut, dict[str, str]]:
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(payload)).id, 60)
    return job, {item.item: item.outcome for item in kith.job_items(job.id)}


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
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, payload in files.items():
            archive.writestr(name, payload)
    job, outcomes = enrolled(kith, gallery, buffer.getvalue())
    names = ["eileen/1.jfif", "eileen/2.jpe", "eileen/IMG_3"]
    assert outcomes == dict.fromkeys(names, "enrolled") | {"eileen/notes.txt": "ignored"}
    assert (job.total, job.done, job.failed, job.details) == (4, 4, 0, {"ignored": 3})
    again, outcomes = enrolled(kith, gallery, as_tar(files))
    assert outcomes == dict.fromkeys(names, "already_enrolled") | {"eileen/notes.txt": "ignored"}
    # An erased subject's name is in no list.
    kith.delete_subject(gallery, "eileen")
    assert {(item.item, item.outcome) for item in kith.job_items(again.id)} == {("", "")}


def test_a_manifest_may_name_any_file(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    manifest = b"file,subject\na.dat,eileen\nb.dat,eileen\n"
    _, outcomes = enrolled(kith, gallery, as_tar({"manifest.csv": manifest, "a.dat": jpeg(astronaut), "b.dat": b"x"}))
    assert outcomes == {"a.dat": "enrolled", "b.dat": "image_format"}
