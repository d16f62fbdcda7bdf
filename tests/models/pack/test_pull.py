"""Pulls are atomic, and later damage is detected."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import ModelError, PullError
from models.pack import open_model_zoo
from models.pack.catalog import ArchiveMember, CatalogEntry, Download, License, PackPart, read_catalog
from models.pack.download import Downloader
from models.pack.loading import BUNDLED_PACK, load_pack, with_pulled_liveness
from models.pack.pull import pull
from models.pack.verification import PULL_RECORD, check_pack, is_present, read_pull_record
from models.vision.specs import Normalization
from tests.http_files import File, Server, serving
from tests.models.pack.test_minifasnet import small_network
from tests.networks import color_network
from tests.packs import pack_with_int8

DETECTOR = (BUNDLED_PACK / "detector.onnx").read_bytes()
RECOGNIZER = (BUNDLED_PACK / "recognizer.onnx").read_bytes()
BOTH = {"detector.onnx": DETECTOR, "recognizer.onnx": RECOGNIZER}
TERMS = {"recognizer": "Apache-2.0", "detector": "MIT"}
FREE = License("CC0-1.0", "https://license.example", "Everything.", False)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({}) as opened:
        yield opened


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def published(server: Server, files: Mapping[str, bytes]) -> tuple[Download, ...]:
    """Serve files, and return their entries in the catalog."""
    server.files |= {f"/{name}": File(content) for name, content in files.items()}
    return tuple(Download(name, f"{server.url}/{name}", sha256(data), len(data)) for name, data in files.items())


def files_pack(server: Server) -> CatalogEntry:
    return CatalogEntry("two-files", "files", "Two files.", FREE, published(server, BOTH))


def archive_pack(server: Server, content: bytes, *members: ArchiveMember) -> CatalogEntry:
    (download,) = published(server, {"pack.zip": content})
    return CatalogEntry("zipped", "zip", "An archive.", FREE, (replace(download, members=members),))


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def fetch(entry: CatalogEntry, models_dir: Path) -> Path:
    return pull(entry, models_dir, downloader=Downloader(attempts=2, backoff_s=0.0, timeout_s=60))


def test_an_interrupted_pull_resumes(server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    server.files["/recognizer.onnx"].cuts = [100_000, 100_000]
    with pytest.raises(PullError):
        fetch(entry, models_dir)
    assert not is_present(entry, models_dir)
    fetch(entry, models_dir)
    assert is_present(entry, models_dir)
    assert not (models_dir / ".pull" / "two-files").exists()
    ranges = [wanted for path, wanted in server.requests if path == "/recognizer.onnx"]
    assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert sum(path == "/detector.onnx" for path, _ in server.requests) == 1


@pytest.mark.parametrize("damage", ["changed", "gone", "record"])
def test_damage_is_reported_and_repaired_by_a_pull(damage: str, server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    directory = fetch(entry, models_dir)
    if damage == "changed":
        (directory / "recognizer.onnx").write_bytes(RECOGNIZER[:-1] + b"x")
    elif damage == "gone":
        (directory / "recognizer.onnx").unlink()
    else:
        (directory / PULL_RECORD).write_text("{")
    results = check_pack(entry, models_dir)
    assert not all(result.ok for result in results)
    assert {result.what for result in results if not result.ok} & {"recognizer.onnx", PULL_RECORD}
    fetch(entry, models_dir)
    assert all(result.ok for result in check_pack(entry, models_dir))


def test_concurrent_pulls_download_once(server: Server, models_dir: Path) -> None:
    entry = files_pack(server)
    threads = [threading.Thread(target=fetch, args=(entry, models_dir)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.ok for result in check_pack(entry, models_dir))
    assert len(server.requests) == 2


def test_networks_that_do_not_run_are_not_installed(
    reference: Path, server: Server, models_dir: Path, tmp_path: Path
) -> None:
    infinite = color_network(tmp_path / "recognizer.onnx", factor=float("inf")).read_bytes()
    entry = replace(files_pack(server), downloads=published(server, BOTH | {"recognizer.onnx": infinite}))
    with pytest.raises(ModelError, match="must be finite"):
        fetch(entry, models_dir)
    assert not (models_dir / "two-files").exists()
    files = {"a.xml": b"<net/>", "a.bin": b"x", "yunet.onnx": (reference / "detector_yunet.onnx").read_bytes()}
    with pytest.raises(ModelError, match="measured with another recognizer"):
        fetch(openvino_pack(server, **files), models_dir)
    assert not (models_dir / "open-model-zoo").exists()


def test_a_pack_with_int8_files_is_pulled_completely(server: Server, models_dir: Path, tmp_path: Path) -> None:
    published = pack_with_int8(tmp_path / "published")
    paths = [path for path in sorted(published.rglob("*")) if path.suffix in (".onnx", ".json")]
    files = {path.relative_to(published).as_posix(): path.read_bytes() for path in paths}
    assert {"recognizer.onnx", "int8/recognizer.onnx"} <= set(files)
    members = [ArchiveMember(name, sha256(content), len(content)) for name, content in files.items()]
    zipped_files = {f"top/{name}": content for name, content in files.items()}
    zipped_files |= dict.fromkeys(("top/other.onnx", "../../other.onnx", str(tmp_path / "other.onnx")), b"x")
    entry = archive_pack(server, zipped(**zipped_files), *members)
    entry = replace(entry, name="kith-compact")  # the name in its manifest
    directory = fetch(entry, models_dir)
    assert read_pull_record(entry, models_dir)["files"] == {name: sha256(content) for name, content in files.items()}
    assert all(result.ok for result in check_pack(entry, models_dir))
    assert not list(tmp_path.parent.rglob("other.onnx"))  # members that are not listed
    int8 = load_pack(directory).recognition.int8
    assert int8 is not None
    assert int8.path == directory / "int8" / "recognizer.onnx"
    (directory / "int8" / "recognizer.onnx").write_bytes(b"x")
    assert not all(result.ok for result in check_pack(entry, models_dir))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(**{"detector.onnx": DETECTOR}), "recognizer.onnx 0 times"),
        (zipped(**{"a/detector.onnx": DETECTOR, "b/detector.onnx": DETECTOR}), "detector.onnx 2 times"),
        (zipped(**{**BOTH, "detector.onnx": DETECTOR + b"x"}), "larger than"),
        (zipped(**{**BOTH, "detector.onnx": bytes(50_000_000)}), f"larger than {len(DETECTOR)} bytes"),
        (zipped(**{**BOTH, "recognizer.onnx": DETECTOR}), "was expected"),
        (zipped(**BOTH)[:-100], "cannot be read"),
        (b"<html>", "cannot be read"),
    ],
    ids=["lacking", "twice", "too large", "a bomb", "another", "cut", "no zip"],
)
def test_invalid_archives_are_rejected(content: bytes, message: str, server: Server, models_dir: Path) -> None:
    members = ArchiveMember("detector.onnx", size=len(DETECTOR)), ArchiveMember("recognizer.onnx", sha256(RECOGNIZER))
    with pytest.raises(PullError, match=message):
        fetch(archive_pack(server, content, *members), models_dir)
    assert not (models_dir / "zipped").exists()
    unpacked = models_dir / ".pull" / "zipped" / "pack" / "detector.onnx"
    assert not unpacked.exists() or unpacked.stat().st_size <= len(DETECTOR)


def openvino_pack(server: Server, **files: bytes) -> CatalogEntry:
    parts = tuple(PackPart(part, license, True, "photos") for part, license in TERMS.items())
    return CatalogEntry("open-model-zoo", "openvino", "Intel's.", FREE, published(server, files), parts)


def test_the_published_network_becomes_a_calibrated_pack(reference: Path, server: Server, models_dir: Path) -> None:
    files = {
        "face-reidentification-retail-0095.xml": (reference / "retail0095.xml").read_bytes(),
        "face-reidentification-retail-0095.bin": (reference / "retail0095.bin").read_bytes(),
        "yunet.onnx": (reference / "detector_yunet.onnx").read_bytes(),
    }
    entry = openvino_pack(server, **files)
    listed = read_catalog()["open-model-zoo"].downloads
    assert {(download.file, download.sha256) for download in listed[:2]} <= {(f, sha256(c)) for f, c in files.items()}
    pack = load_pack(fetch(entry, models_dir))
    told = (pack.model_id, pack.detection.head, pack.detection.normalization.color)
    assert told == ("open-model-zoo", "yunet", "BGR")
    assert pack.recognition.normalization == Normalization(0.0, 1.0, "BGR")
    assert pack.recognition.alignment == open_model_zoo.ALIGNMENT
    assert pack.calibration is not None
    assert pack.calibration["recognizer"] == pack.recognition.fingerprint()
    assert {part: pack.provenance[part]["license"] for part in TERMS} == TERMS
    assert all(result.ok for result in check_pack(entry, models_dir))
    assert set(read_pull_record(entry, models_dir)["files"]) == {
        "calibration.json", "detector.onnx", "manifest.json", "recognizer.bin", "recognizer.xml",
    }  # fmt: skip
    assert json.loads((pack.directory / PULL_RECORD).read_text())["license"]["name"] == FREE.name


def test_a_liveness_network_is_pulled_beside_packs(server: Server, models_dir: Path) -> None:
    files = {f"{name}.onnx": small_network(seed) for seed, name in enumerate("ab")}
    entry = CatalogEntry("minifasnet", "liveness", "Minivision's.", FREE, published(server, files))
    bundled = load_pack(BUNDLED_PACK)
    assert with_pulled_liveness(bundled, models_dir) == bundled
    directory = fetch(entry, models_dir)
    assert directory == models_dir / "liveness" / "minifasnet"
    found = with_pulled_liveness(bundled, models_dir).liveness
    assert found is not None
    assert found.path == directory / "liveness.onnx"
    assert all(result.ok for result in check_pack(entry, models_dir))
