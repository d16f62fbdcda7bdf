"""Archives of photos, some of them malicious, and the jobs that enroll them."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from kith.wire.jobs import JobOut
from models.vision.photo_files import list_photos
from service.cli.tools.photo_folders import TarStream, photos_of, split
from service.core.errors import ArchiveInvalidError, ImageError, StorageFullError
from service.core.unpacking import ZstdFile
from service.domain.gallery import GallerySettings
from service.inference.archives import ArchiveContents, ArchiveLimits, iterate_members, read_contents
from service.jobs.spool import ABANDONED_AFTER_S, RESERVED_BYTES, Spool
from service.security.sealing import Seal, new_key
from service.settings import Settings
from service.storage.repositories.jobs import JobStore
from service.storage.repositories.store import Store
from tests.conftest import is_eventually, jpeg
from tests.databases import open_database
from tests.refusals import check, raises_code
from tests.service.api.http.test_body_limits import first_status
from tests.service.cli.conftest import Program, written
from tests.service.inference.test_archive_names import zip_of

LIMITS = ArchiveLimits(1000, 100_000, 1_000_000)
SEAL = Seal(new_key())
FILES = {"ada/1.jpg": b"first", "ada/old/2.JPEG": b"second", "bob/1.png": b"third", "bob/notes.txt": b"no photo"}


def as_tar(files: dict[str, bytes], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for name, payload in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def as_zip(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, payload in files.items():
            archive.writestr(name, payload)
    return buffer.getvalue()


def as_zstd(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with ZstdFile(packed, "w") as stream:
        stream.write(as_tar(files))
    return packed.getvalue()


def as_gzip(files: dict[str, bytes]) -> bytes:
    return gzip.compress(as_tar(files))


KINDS: list[Callable[[dict[str, bytes]], bytes]] = [as_zip, as_tar, as_gzip, as_zstd]


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(payload: bytes) -> Path:
        path = tmp_path / "archive"
        path.write_bytes(payload)
        return path

    return write


Archive = Callable[[bytes], Path]


def what_is_in(
    path: Path, strip: int | None = None, limits: ArchiveLimits = LIMITS, names: str | None = None
) -> ArchiveContents:
    return read_contents(path, limits, strip, lambda: None, names=names)


def payloads(path: Path, limits: ArchiveLimits = LIMITS) -> dict[str, bytes]:
    return {member.name: member.read() for member in iterate_members(path, limits)}


def test_a_folder_above_the_people_is_seen(archive: Archive) -> None:
    path = archive(as_zip({f"photos/{name}": payload for name, payload in FILES.items()}))
    assert set(what_is_in(path).subjects.values()) == {"ada", "bob"}
    assert set(what_is_in(path, strip=0).subjects.values()) == {"photos"}
    assert set(what_is_in(path, strip=1).subjects.values()) == {"ada", "bob"}
    # All photos show one person, so the folder names the subject.
    alone = archive(as_zip({"ada/1.jpg": b"", "ada/2.jpg": b""}))
    assert set(what_is_in(alone).subjects.values()) == {"ada"}
    assert what_is_in(archive(as_zip({"1.jpg": b""}))).subjects == {"1.jpg": None}


@pytest.mark.parametrize("root", ["", "photos/"])
def test_a_manifest_says_whose_a_photo_is(archive: Archive, root: str) -> None:
    # macOS writes decomposed names.
    manifest = 'note,file,subject\nx,./x/Jos\xe9.jpg,Jose\u0301\n\n,2.dat,"Lovelace, A."\n,gone.jpg,bob\n'
    files = {"x/Jose\u0301.jpg": b"1", "manifest.csv": manifest.encode("utf-8-sig"), "2.dat": b"2", "3.jpg": b"3"}
    found = what_is_in(archive(as_tar({root + name: payload for name, payload in files.items()})))
    assert found.subjects == {f"{root}x/Jose\u0301.jpg": "Jos\xe9", f"{root}2.dat": "Lovelace, A."}
    assert (found.missing, found.ignored) == (["gone.jpg"], {f"{root}3.jpg": None})
    for wrong in (b"file,person\n1.jpg,ada\n", b"\xff\xfe\x00", b'file,subject\n"1.jpg\n'):
        with pytest.raises(ArchiveInvalidError):
            what_is_in(archive(as_zip({"manifest.csv": wrong, "1.jpg": b"1"})))
    # A manifest is UTF-8, and names files as they are read.
    files = {"manifest.csv": "file,subject\n王伟.jpg,eileen\n".encode(), "王伟.jpg": b"photo"}
    path = archive(as_tar(files, encoding="gbk", format=tarfile.GNU_FORMAT))
    with pytest.raises(ArchiveInvalidError, match="is not UTF-8"):
        what_is_in(path)
    assert what_is_in(path, names="gbk").subjects == {"王伟.jpg": "eileen"}


def test_hidden_files_are_passed_over_and_paths_are_only_names(archive: Archive, tmp_path: Path) -> None:
    outside = "../" * 20 + "etc/passwd.jpg"
    files = {"__MACOSX/ada/._1.jpg": b"", ".git/a/1.jpg": b"", outside: b"x", "/root/1.jpg": b"y"}
    for pack in (as_tar, as_zip):
        path = archive(pack(files))
        found = what_is_in(path)
        assert (set(found.subjects.values()), found.hidden) == ({"etc", "root"}, 2)
        assert payloads(path) == files
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_unusual_names_are_distinguished_and_links_and_devices_are_no_photos(archive: Archive) -> None:
    long = "ada/" + "x" * 3000
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"ada/{number}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("ada/1.jpg", "ada/1.jpg", f"{long}1.jpg", f"{long}2.jpg", "ada/\udcff.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    names = list(payloads(archive(buffer.getvalue())))
    assert names[:2] == ["ada/1.jpg", "ada/1.jpg#2"]
    assert len(set(names)) == len(names) == 5
    assert all(len(name) <= 512 and name.encode() for name in names)


# Archives that mean harm


@pytest.mark.parametrize("pack", KINDS)
def test_every_kind_of_archive_is_read_alike(archive: Archive, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    path = archive(pack(FILES))
    assert payloads(path) == FILES
    found = what_is_in(path)
    assert found.subjects == {"ada/1.jpg": "ada", "ada/old/2.JPEG": "ada", "bob/1.png": "bob"}
    assert (found.missing, found.ignored, found.hidden) == ([], {"bob/notes.txt": "bob"}, 0)
    many, zeros = ({f"a/{i}.jpg": bytes(size) for i in range(20)} for size in (0, 90_000))
    with raises_code("archive_too_large", match="19 files"):
        what_is_in(archive(pack(many)), limits=ArchiveLimits(19, 100, 1_000_000))
    with raises_code("archive_too_large", match="unpacked"):
        what_is_in(archive(pack(zeros)))
    # A photo that is too large fails alone.
    read = []
    for member in iterate_members(archive(pack({"a/1.jpg": bytes(100_001), "a/2.jpg": b"fine"})), LIMITS):
        try:
            read.append(member.read())
        except ImageError as error:
            read.append(error.code.encode())
    assert read == [b"image_too_large", b"fine"]


def rewritten(payload: bytes, local: int, central: int, change: Callable[[bytes], bytes]) -> bytes:
    """Change bytes at these offsets of a zip's first local header and directory entry."""
    made = bytearray(payload)
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = made.index(signature) + offset
        made[at : at + 4] = change(bytes(made[at : at + 4]))
    return bytes(made)


def test_a_file_that_cannot_be_read_fails_alone(archive: Archive) -> None:
    two = {"a/1.jpg": bytes(50_000), "a/2.jpg": b"fine"}
    for payload, said in (
        (
            rewritten(as_zip(two), 22, 24, lambda _: (1000).to_bytes(4, "little")),
            "unpacked",
        ),  # unpacks to more than it says
        (rewritten(as_zip(two), 6, 8, lambda flags: bytes([flags[0] | 1]) + flags[1:]), "encrypted"),
        (as_zip(two, zipfile.ZIP_BZIP2), "neither stored nor deflated"),
        (as_zip(two, zipfile.ZIP_LZMA), "neither stored nor deflated"),
    ):
        first, second = iterate_members(archive(payload), LIMITS)
        with pytest.raises(ArchiveInvalidError, match=said):
            first.read()
        assert second.name == "a/2.jpg"


# The spool


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.path("a" * 32).symlink_to("/dev/full")
    with pytest.raises(StorageFullError), spool.receiving("a" * 32, SEAL) as file:
        file.write(bytes(1_000_000))
        spool.sync(file)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_any_size_does_not_fill_the_disk(
    kith: Kith, gallery: str, server: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = settings.data_dir / "spool"
    folder.mkdir(exist_ok=True)
    usage = shutil.disk_usage(folder)

    def seen(path: Path) -> Any:
        """Simulate a disk with 4 MB of free space."""
        return usage._replace(free=RESERVED_BYTES + 4_000_000 - sum(file.stat().st_size for file in path.iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", seen)
    path = f"/v1/galleries/{gallery}/enrollments"
    body = chain([b"PK\3\4" + bytes(60)], repeat(bytes(200_000), 100))
    check(httpx.post(server + path, content=body, timeout=60), 507, "storage_full")
    assert list(folder.iterdir()) == []
    assert first_status(server, "POST", path, "application/zip", 5_000_000) == 507, "refused before it is sent"


def test_abandoned_archives_are_removed(tmp_path: Path) -> None:
    spool, database = Spool(tmp_path / "spool"), open_database(f"sqlite:///{tmp_path}/kith.db")
    store = JobStore(database)
    spool.tidy(store)
    gallery = Store(database).galleries.create("g", "f" * 32, 8, GallerySettings())
    waiting, over = (store.create(gallery, "enrollment", {}) for _ in range(2))
    store.cancel(over.id)
    old, ahead = -2 * ABANDONED_AFTER_S, 400 * 86400  # written while the clock was wrong
    for name, age_s in ((waiting.id, old), (over.id, old), ("never-a-job", old), ("coming", 0), ("ahead", ahead)):
        with spool.receiving(name, SEAL) as file:
            file.write(b"x")
        os.utime(spool.path(name), (0, time.time() + age_s))
    spool.path("removed-meanwhile").symlink_to(tmp_path / "nothing")  # as listed, and gone when it is looked at
    spool.tidy(store)
    spool.path("removed-meanwhile").unlink()
    assert {path.name for path in (tmp_path / "spool").iterdir()} == {waiting.id, "coming"}
    assert spool.has(waiting)
    database.close()


# Folders


def test_a_folders_photos_are_sent_in_parts_without_unreadable_ones(tmp_path: Path, archive: Archive) -> None:
    folder, names = tmp_path / "people", ["ada/1.jpg", "ada/deep/er/2.png", "bob ü/5.JPG", "bob ü/6.jpg"]
    written(folder, {name: name.encode() * 100 for name in names[:3]})
    (folder / names[3]).symlink_to(folder / names[0])
    stream = TarStream(photos := photos_of(folder, list_photos(folder)))
    sent = b"".join(stream)
    assert len(sent) == stream.size == len(b"".join(stream))
    assert payloads(archive(sent)) == {name: (folder / name).read_bytes() for name in names}
    assert [[p.name for p in part] for part in split(photos, 3000)] == [names[:2], names[2:]]
    photos[0].path.unlink()
    assert len(b"".join(stream)) == stream.size
    assert set(stream.unreadable) == {names[0], names[3]}


# Jobs


class Bytes:
    def __init__(self, payload: bytes) -> None:
        self.payload, self.size = payload, len(payload)

    def __iter__(self) -> Iterator[bytes]:
        yield self.payload


def enrolled(kith: Kith, gallery: str, payload: bytes, **options: Any) -> JobOut:
    return kith.wait_for(kith.enroll_archive(gallery, Bytes(payload), **options).id, 60)


def refused(kith: Kith, job: JobOut) -> dict[str, str]:
    """Return the codes of a job's refused items."""
    return {item.item: item.problem.code for item in kith.job_items(job.id) if item.problem}


@pytest.fixture(scope="module")
def photos(
    astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], group: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> dict[str, bytes]:
    return {
        "eileen/1.jpg": jpeg(astronaut),
        "eileen/2.jpg": jpeg(astronaut[:, ::-1], 70),
        "eileen/copy.jpg": jpeg(astronaut),
        "eileen/tom.jpg": jpeg(actor),
        "nobody/1.jpg": jpeg(nobody),
        "nobody/2.jpg": b"no photo at all",
        "several/1.jpg": jpeg(group),
        "tom/1.jpg": jpeg(actor),
        "tom/dark.jpg": jpeg((actor * 0.12).astype(np.uint8)),
        "twin/1.jpg": jpeg(astronaut[:, ::-1], 80),
        "lost.jpg": jpeg(actor),
        "tom/readme.txt": b"",
        " spaces /1.jpg": jpeg(actor),
    }


REFUSED = {
    "eileen/tom.jpg": "inconsistent_template",
    "nobody/1.jpg": "no_face",
    "nobody/2.jpg": "image_format",
    "several/1.jpg": "several_faces",
    "tom/dark.jpg": "low_quality",
    "twin/1.jpg": "duplicate_subject",
    "lost.jpg": "invalid_request",
    " spaces /1.jpg": "invalid_request",
}


def test_each_photo_of_an_archive_is_decided_on_alone(
    kith: Kith, gallery: str, photos: dict[str, bytes], settings: Settings
) -> None:
    job = enrolled(kith, gallery, as_zip(photos))
    assert (job.state, job.total_count, job.done_count, job.failed_count) == ("succeeded", 13, 13, 8)
    assert refused(kith, job) == REFUSED
    items = {item.item: item for item in kith.job_items(job.id)}
    told = {"tom/readme.txt": "ignored", "tom/1.jpg": "enrolled", "nobody/1.jpg": "no_face"}
    assert {name: items[name].outcome for name in told} == told
    assert {item.face_count for item in items.values() if item.outcome == "enrolled"} == {1}
    assert "eileen" not in str(items["twin/1.jpg"].problem)  # an erasure of eileen would not find her name there
    assert (job.counts["enrolled"], job.counts["already_enrolled"], job.details) == (3, 1, {"ignored": 1})
    assert {s.id: s.template_count for s in kith.subjects(gallery)} == {"eileen": 2, "tom": 1}
    assert kith.gallery(gallery).template_count == 3
    # The same once more, otherwise packed and named: nothing is enrolled twice.
    again = enrolled(kith, gallery, as_gzip({f"x/{name}": payload for name, payload in photos.items()}), strip=1)
    assert again.counts["already_enrolled"] == 4
    assert "enrolled" not in again.counts
    assert kith.gallery(gallery).template_count == 3
    # Deleted templates may be enrolled again; moved templates stay.
    tom, *_ = kith.templates(gallery, "tom")
    kith.put_subject(gallery, "thomas")
    kith.move_template(gallery, "tom", tom.id, "thomas")
    kith.delete_subject(gallery, "eileen")
    third = enrolled(kith, gallery, as_zip(photos))
    assert (third.counts["enrolled"], third.counts["already_enrolled"]) == (2, 2)
    assert {s.id: s.template_count for s in kith.subjects(gallery)} == {"eileen": 2, "thomas": 1, "tom": 0}
    assert list((settings.data_dir / "spool").iterdir()) == []


def test_checks_may_be_overridden_and_a_manifest_names_people(
    kith: Kith, gallery: str, photos: dict[str, bytes]
) -> None:
    manifest = b"file,subject\nflat.jpg,eileen\ngone.jpg,tom\n"
    job = enrolled(kith, gallery, as_zstd({"flat.jpg": photos["eileen/1.jpg"], "manifest.csv": manifest}))
    assert refused(kith, job) == {"gone.jpg": "invalid_request"}
    (here,) = kith.templates(gallery, "eileen")
    kith.create_gallery("of-another-key")
    allowed = {"allow_duplicate": True, "allow_inconsistent": True, "allow_low_quality": True, "face": "largest"}
    job = enrolled(kith, "of-another-key", as_zip(photos), **allowed)
    assert set(refused(kith, job).values()) == {"no_face", "image_format", "invalid_request"}
    # Template ids appear in receipts; they are keyed, so equal photos have different ids in two galleries.
    assert here.id not in {template.id for template in kith.templates("of-another-key", "eileen")}
    kith.delete_gallery("of-another-key")


def many(photos: dict[str, bytes], count: int, others: dict[str, bytes] | None = None) -> bytes:
    """So many photos that differ, of two people by turns of five, and then the others."""
    people = [("eileen", photos["eileen/1.jpg"]), ("tom", photos["tom/1.jpg"])]
    files = {}
    for number in range(count):
        name, payload = people[number // 5 % 2]
        files[f"{name}/{number:04}.jpg"] = payload + number.to_bytes(4)
    return as_tar(files | (others or {}))


def test_without_its_gallery_it_ends_and_leaves_nothing(
    kith: Kith, photos: dict[str, bytes], settings: Settings
) -> None:
    kith.create_gallery("short-lived")
    gone = kith.enroll_archive("short-lived", Bytes(many(photos, 120)))
    has_done(kith, gone, 5)
    kith.delete_gallery("short-lived")
    is_eventually(lambda: not list((settings.data_dir / "spool").iterdir()))


def test_other_writes_to_the_gallery_delay_no_photo(kith: Kith, gallery: str, photos: dict[str, bytes]) -> None:
    """The checks of a photo are repeated only after a change of templates."""
    job, writes = kith.enroll_archive(gallery, Bytes(many(photos, 20))), 0
    while (now := kith.job(job.id)).state in ("queued", "running"):
        kith.put_subject(gallery, "another", metadata={"writes": writes})
        writes += 1
    assert writes > 4, "several in each transaction of the job"
    assert (now.state, now.counts) == ("succeeded", {"enrolled": 20})


def has_done(kith: Kith, job: JobOut, photos: int) -> None:
    """Wait until a job has done so many photos, and has not ended."""
    while (now := kith.job(job.id)).done_count < photos:
        assert now.state in ("queued", "running")
        threading.Event().wait(0.02)


def test_names_of_people_and_files(kith: Kith, gallery: str, tmp_path: Path, server: str) -> None:
    names = zip_of(("表/1.jpg".encode("cp932"), False), ("Ren\ufffd/1.jpg".encode(), True))
    job = enrolled(kith, gallery, names)
    assert job.problem is not None and (job.state, job.problem.code) == ("failed", "archive_invalid")
    # The content is no photo: a name that is accepted is refused for that later.
    expected = {"表/1.jpg": "image_format", "Ren\ufffd/1.jpg": "invalid_request"}
    (tmp_path / "people.zip").write_bytes(names)
    words = ("enroll", "people.zip", "-g", gallery, "--json", "--names", "Shift-JIS")
    done = json.loads(Program(tmp_path, server)(*words, status=1))
    assert {row["photo"]: row["code"] for row in done["refused"]} == expected
    # Normalization takes quadratic time for marks in descending order: over a minute for these.
    marks, started = "a" + "\u0315\u0300" * 20_000, time.monotonic()
    job = enrolled(kith, gallery, as_tar({f"{marks}/{number}.jpg": b"photo" for number in range(40)}))
    assert job.counts == {"invalid_request": 40}
    assert time.monotonic() - started < 30
