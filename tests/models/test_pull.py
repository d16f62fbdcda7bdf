"""Packs are pulled whole or not at all, from a real server on loopback; what is damaged later is noticed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.catalog import Download, Entry, Kind, Licence, Member
from models.download import Downloader
from models.errors import (
    ArchiveError,
    DownloadCorruptError,
    DownloadError,
    LicenceNotAcceptedError,
    ModelError,
    PackError,
)
from models.pack import BUNDLED, find_pack, load_pack
from models.pull import RECORD, check, directory_of, is_present, pull, read_record
from tests.http_files import File, Server, serving

DETECTOR = (BUNDLED / "detector.onnx").read_bytes()
RECOGNISER = (BUNDLED / "recogniser.onnx").read_bytes()
FREE = Licence("CC0-1.0", "https://licence.example", "Everything.", False)
ASKED = Licence("Research", "https://licence.example", "Research.", True)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({"/detector.onnx": File(DETECTOR), "/recogniser.onnx": File(RECOGNISER)}) as opened:
        yield opened


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def files_pack(server: Server, licence: Licence = FREE, checksums: bool = True) -> Entry:
    downloads = [
        Download(name, f"{server.url}/{name}", None, sha256(content) if checksums else None, None)
        for name, content in (("detector.onnx", DETECTOR), ("recogniser.onnx", RECOGNISER))
    ]
    return Entry("two-files", "files", "Two files.", licence, tuple(downloads))


def archive_pack(
    server: Server, content: bytes, kind: Kind = "zip", members: tuple[Member, ...] | None = None
) -> Entry:
    server.files["/pack.zip"] = File(content)
    kept = members or (
        Member("detector.onnx", sha256(DETECTOR), len(DETECTOR)),
        Member("recogniser.onnx", sha256(RECOGNISER), None),
    )
    download = Download("pack.zip", f"{server.url}/pack.zip", None, sha256(content), len(content), kept)
    return Entry("zipped", kind, "An archive.", FREE, (download,))


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def quick() -> Downloader:
    return Downloader(attempts=2, pause_s=0.0, timeout_s=5.0)


def fetch(entry: Entry, models_dir: Path, accepted: bool = False) -> Path:
    return pull(entry, models_dir, accepted, downloader=quick())


def test_files_become_a_pack_that_is_found_by_name(server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    directory = fetch(entry, models_dir)
    assert directory == find_pack(Path("two-files"), models_dir) == models_dir / "two-files"
    assert load_pack(directory).model_id == "two-files"
    assert all(finding.ok for finding in check(entry, models_dir))
    record = read_record(entry, models_dir)
    assert record["files"]["detector.onnx"] == sha256(DETECTOR)
    assert record["downloads"][1]["url"] == f"{server.url}/recogniser.onnx"
    assert not (models_dir / ".pull" / "two-files").exists()
    asked = len(server.requests)
    assert fetch(entry, models_dir) == directory
    assert len(server.requests) == asked  # it is here, and whole


def test_a_licence_is_accepted_before_anything_is_fetched(server: Server, models_dir: Path) -> None:
    entry = files_pack(server, ASKED)
    with pytest.raises(LicenceNotAcceptedError, match=r"licence_not_accepted.*--accept-licence"):
        fetch(entry, models_dir)
    assert server.requests == []
    assert not models_dir.exists()
    fetch(entry, models_dir, accepted=True)
    assert read_record(entry, models_dir)["licence"] == {**vars(ASKED), "accepted": True}


def test_an_interrupted_pull_goes_on(server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    server.files["/recogniser.onnx"].cuts = [100_000, 100_000]
    with pytest.raises(DownloadError):
        fetch(entry, models_dir)
    assert not is_present(entry, models_dir)
    fetch(entry, models_dir)
    assert is_present(entry, models_dir)
    ranges = [wanted for path, wanted, _ in server.requests if path == "/recogniser.onnx"]
    assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert sum(path == "/detector.onnx" for path, _, _ in server.requests) == 1


def test_without_published_checksums_what_was_found_is_recorded(server: Server, models_dir: Path) -> None:
    entry = files_pack(server, checksums=False)
    fetch(entry, models_dir)
    assert read_record(entry, models_dir)["downloads"][0]["sha256"] == sha256(DETECTOR)
    (models_dir / "two-files" / "detector.onnx").write_bytes(RECOGNISER)
    (found,) = [finding for finding in check(entry, models_dir) if finding.what == "detector.onnx"]
    assert not found.ok
    assert "was recorded when it was pulled" in found.detail


@pytest.mark.parametrize("damage", ["changed", "gone", "record"])
def test_damage_is_said_and_another_pull_mends_it(damage: str, server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    directory = fetch(entry, models_dir)
    if damage == "changed":
        (directory / "recogniser.onnx").write_bytes(RECOGNISER[:-1] + b"x")
    elif damage == "gone":
        (directory / "recogniser.onnx").unlink()
    else:
        (directory / RECORD).write_text("{")
    findings = check(entry, models_dir)
    assert not all(finding.ok for finding in findings)
    assert {finding.what for finding in findings if not finding.ok} & {"recogniser.onnx", RECORD}
    fetch(entry, models_dir)
    assert all(finding.ok for finding in check(entry, models_dir))


def test_what_is_not_here_is_said(server: Server, models_dir: Path) -> None:
    findings = check(files_pack(server), models_dir)
    assert [finding.ok for finding in findings] == [False, False]
    assert "has not been pulled" in findings[0].detail


def test_two_processes_pull_once(server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    threads = [threading.Thread(target=fetch, args=(entry, models_dir)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(finding.ok for finding in check(entry, models_dir))
    assert len(server.requests) == 2


def test_networks_that_do_not_run_are_not_installed(server: Server, models_dir: Path) -> None:
    server.files["/recogniser.onnx"].content = b"not a network"
    with pytest.raises(ModelError):
        fetch(files_pack(server, checksums=False), models_dir)
    assert not (models_dir / "two-files").exists()


def test_an_archive_gives_only_what_is_asked_for(server: Server, models_dir: Path) -> None:
    content = zipped(**{"deep/detector.onnx": DETECTOR, "deep/recogniser.onnx": RECOGNISER, "deep/other.onnx": b"x"})
    entry = archive_pack(server, content)
    directory = fetch(entry, models_dir)
    assert sorted(path.name for path in directory.iterdir()) == ["detector.onnx", RECORD, "recogniser.onnx"]
    findings = check(entry, models_dir)
    assert all(finding.ok for finding in findings)
    (licence,) = [finding for finding in findings if finding.what == "licence"]
    assert "default_non_commercial" in licence.detail  # InsightFace's own word for a pack without a signed licence
    (directory / "MODEL.LICENSE").write_text("{}")
    assert [finding.what for finding in check(entry, models_dir) if not finding.ok] == ["licence"]


def test_a_pack_with_variants_travels_whole(server: Server, models_dir: Path) -> None:
    paths = [path for path in sorted(BUNDLED.rglob("*")) if path.suffix in (".onnx", ".json")]
    files = {path.relative_to(BUNDLED).as_posix(): path.read_bytes() for path in paths}
    assert {"recogniser.onnx", "int8/recogniser.onnx"} <= set(files)
    members = tuple(Member(name, sha256(content), len(content)) for name, content in files.items())
    entry = archive_pack(server, zipped(**{f"top/{name}": content for name, content in files.items()}), members=members)
    entry = replace(entry, name="kith-compact")  # as its manifest says
    directory = fetch(entry, models_dir)
    assert read_record(entry, models_dir)["files"] == {name: sha256(content) for name, content in files.items()}
    assert all(finding.ok for finding in check(entry, models_dir))
    variants = load_pack(directory).recognition.variants
    assert directory / "int8" / "recogniser.onnx" in [variant.path for variant in variants]
    (directory / "int8" / "recogniser.onnx").write_bytes(b"x")
    assert not all(finding.ok for finding in check(entry, models_dir))


BOTH = {"detector.onnx": DETECTOR, "recogniser.onnx": RECOGNISER}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(**BOTH, **{"../../evil.onnx": b"x"}), r"\.\./\.\./evil\.onnx.*outside"),
        (zipped(**BOTH, **{"/etc/evil": b"x"}), "outside"),
        (zipped(**BOTH, **{"C:\\evil": b"x"}), "outside"),
        (zipped(**{"detector.onnx": DETECTOR}), "recogniser.onnx 0 times"),
        (zipped(**{"a/detector.onnx": DETECTOR, "b/detector.onnx": DETECTOR}), "detector.onnx 2 times"),
        (zipped(**{**BOTH, "detector.onnx": DETECTOR + b"x"}), "larger than"),
        (zipped(**{**BOTH, "recogniser.onnx": DETECTOR}), "was expected"),
        (zipped(**BOTH)[:-100], "cannot be read"),
        (b"<html>", "cannot be read"),
    ],
    ids=["traversal", "absolute", "drive", "lacking", "twice", "too large", "another", "cut", "no zip"],
)
def test_archives_that_are_not_what_they_should_be(
    content: bytes, message: str, server: Server, models_dir: Path
) -> None:
    with pytest.raises(ArchiveError, match=message):
        fetch(archive_pack(server, content), models_dir)
    assert not (models_dir / "zipped").exists()
    assert not list(models_dir.parent.rglob("evil*"))


def test_an_archive_that_unpacks_without_end_is_stopped(server: Server, models_dir: Path) -> None:
    bomb = zipped(**{**BOTH, "detector.onnx": bytes(50_000_000)})
    assert len(bomb) < 10_000_000
    with pytest.raises(ArchiveError, match=f"larger than {len(DETECTOR)} bytes"):
        fetch(archive_pack(server, bomb), models_dir)
    assert (models_dir / ".pull" / "zipped" / "pack" / "detector.onnx").stat().st_size <= len(DETECTOR)


def test_a_replaced_archive_is_refused(server: Server, models_dir: Path) -> None:
    entry = archive_pack(server, zipped(**BOTH))
    server.files["/pack.zip"] = File(zipped(**{**BOTH, "more": b"x"}).ljust(entry.size or 0))
    with pytest.raises(DownloadCorruptError):
        fetch(entry, models_dir)


def test_a_models_directory_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(PackError, match="cannot be written"):
        fetch(files_pack(server), tmp_path / "file")


def sdist(content: bytes, name: str = "models-1/package/network.dat") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, data in (("models-1/setup.py", b"raise SystemExit('setup.py was run')"), (name, content)):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def dlib_pack(archive: bytes, content: bytes) -> Entry:
    member = Member("network.dat", sha256(content), len(content))
    download = Download("models-1.tar.gz", None, "some-models", sha256(archive), len(archive), (member,))
    return Entry("dlib-resnet", "dlib", "dlib's.", FREE, (download,))


def index_of(archive: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    page = b'<a href="../../files/models-1.tar.gz">models-1.tar.gz</a>'
    server.files["/simple/some-models/"] = File(page, content_type="text/html")
    server.files["/files/models-1.tar.gz"] = File(archive)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")


def test_a_package_that_is_another_network_is_refused(
    server: Server, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = sdist(b"not dlib's network")
    index_of(archive, server, monkeypatch)
    with pytest.raises(ModelError, match="not dlib's face recognition network"):
        fetch(dlib_pack(archive, b"not dlib's network"), models_dir)
    asked = len(server.requests)
    with pytest.raises(ModelError, match="not dlib's"):
        fetch(dlib_pack(archive, b"not dlib's network"), models_dir)
    assert len(server.requests) == asked  # the archive is at hand
    elsewhere = sdist(b"x", "models-1/other.dat")
    index_of(elsewhere, server, monkeypatch)
    with pytest.raises(ArchiveError, match=r"does not hold network\.dat"):
        fetch(dlib_pack(elsewhere, b"x"), models_dir / "other")


def test_the_true_network_out_of_a_package_becomes_a_calibrated_pack(
    dlib_file: Path, server: Server, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = dlib_file.read_bytes()
    archive = sdist(content)
    index_of(archive, server, monkeypatch)
    entry = dlib_pack(archive, content)
    pack = load_pack(fetch(entry, models_dir))
    assert pack.calibration is not None
    assert pack.recognition.alignment.size_px == 150
    assert not pack.recognition.alignment.is_standard
    assert all(finding.ok for finding in check(entry, models_dir))
    record = read_record(entry, models_dir)
    assert set(record["files"]) == {
        "MODEL_CARD.md", "calibration.json", "detector.onnx", "manifest.json", "recogniser.onnx",
    }  # fmt: skip
    assert json.loads((pack.directory / RECORD).read_text())["licence"]["name"] == "CC0-1.0"


def test_the_bundled_pack_needs_no_pull(models_dir: Path) -> None:
    entry = Entry("kith-compact", "bundled", "Ours.", FREE, ())
    assert fetch(entry, models_dir) == directory_of(entry, models_dir) == BUNDLED
    assert all(finding.ok for finding in check(entry, models_dir))
    assert not models_dir.exists()
