"""``kith models`` with a catalog whose files are on a loopback server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image

from models.checksums import sha256_of
from models.engines.selection import available_precisions
from models.pack import quantization
from models.pack.loading import BUNDLED_PACK, load_pack
from service.settings import load_settings
from tests.conftest import jpeg
from tests.http_files import File, Server, serving
from tests.service.cli.conftest import Program, written
from tests.service.inference.image_files import heic

CATALOG = """
[[pack]]
name = "kith-compact"
kind = "bundled"
about = "Ours."
license = { name = "Research", url = "https://license.example", allows = "Research.", acceptance = false }

[[pack]]
name = "mirrored"
kind = "files"
about = "Ours again, from a mirror."
license = { name = "Research", url = "https://license.example", allows = "Research only.", acceptance = true }

[[pack.downloads]]
file = "detector.onnx"
url = "SERVER/detector.onnx"
sha256 = "SHA256"
size = SIZE

[[pack.downloads]]
file = "recognizer.onnx"
url = "SERVER/recognizer.onnx"
"""


@pytest.fixture
def mirror() -> Iterator[Server]:
    names = ("detector.onnx", "recognizer.onnx")
    with serving({f"/{name}": File((BUNDLED_PACK / name).read_bytes()) for name in names}) as server:
        yield server


Models = Callable[..., str]


@pytest.fixture
def models(local: Program) -> Models:
    """Call ``kith models``; return what it prints, without line breaks."""

    def call(*words: str, code: int = 0, pack: str = "kith-compact") -> str:
        printed = local("models", *words, status=code, KITH_PACK=pack)
        return printed if "--json" in words else " ".join((printed + local.stderr).split())

    return call


@pytest.fixture
def catalog(mirror: Server, tmp_path: Path) -> Path:
    detector = BUNDLED_PACK / "detector.onnx"
    text = CATALOG.replace("SERVER", mirror.url).replace("SHA256", sha256_of(detector))
    path = tmp_path / "data" / "models" / "catalog.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("SIZE", str(detector.stat().st_size)))
    return path


@pytest.mark.usefixtures("catalog")
def test_pull_list_show_and_verify(mirror: Server, models: Models, tmp_path: Path) -> None:
    refused = models("pull", "mirrored", code=3)
    assert "(license_not_accepted) Nothing was downloaded. Read the license, and repeat with --accept" in refused
    assert "https://license.example" in refused
    assert mirror.requests == []
    assert not (tmp_path / "data" / "models" / "mirrored").exists()

    pulled = models("pull", "mirrored", "--accept-license")
    assert "KITH_PACK=mirrored" in pulled
    assert "kith models calibrate mirrored --photos FOLDER" in pulled
    found = sha256_of(BUNDLED_PACK / "recognizer.onnx")
    again = json.loads(models("pull", "mirrored", "--json"))  # the license was accepted before
    assert again["pulled"]["license"]["accepted"] is True
    assert len(mirror.requests) == 2

    served = [row["served"] for row in json.loads(models("list", "--json", pack="mirrored"))]
    assert served == [False, True]
    assert re.search(r"mirrored .*unknown yes yes", models("list", pack="mirrored"))

    shown = models("show", "mirrored")
    for word in ("Research only.", "unknown", mirror.url, "explicit thresholds only", "--accept-license"):
        assert word in shown
    assert json.loads(models("show", "mirrored", "--json"))["pulled"]["files"]["recognizer.onnx"] == found
    assert "LFW View 2 accuracy" in models("show", "kith-compact")

    assert f"embeddings have {load_pack(BUNDLED_PACK).recognition.dimension} dimensions" in models("verify")
    recognizer = tmp_path / "data" / "models" / "mirrored" / "recognizer.onnx"
    recognizer.write_bytes(recognizer.read_bytes()[:-1] + b"x")
    damaged = json.loads(models("verify", "mirrored", "--json", code=1))["mirrored"]
    assert [finding["what"] for finding in damaged if not finding["ok"]] == ["recognizer.onnx"]
    recognizer.unlink()
    models("pull", "mirrored")
    models("verify")


@pytest.mark.usefixtures("catalog")
def test_calibration_reads_photos_of_phones_and_names_damaged_ones(
    models: Models, tmp_path: Path, astronaut: NDArray[np.uint8]
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    lying = heic(Image.fromarray(np.ascontiguousarray(np.rot90(astronaut))), exif=exif.tobytes())
    phone = {"phone/a.heic": lying, "phone/damaged.heic": lying[: len(lying) // 2]}
    album = {"album/a.jpg": jpeg(astronaut), "album/mirrored.jpg": jpeg(astronaut[:, ::-1])}
    written(tmp_path, phone | album)
    models("pull", "mirrored", "--accept-license")
    refused = models("calibrate", "mirrored", "--photos", "album", code=3)
    assert "album has 1 usable faces (1 copies of photos skipped)" in refused
    assert "keep their calibration" in models("calibrate", "kith-compact", "--photos", "album", code=3)
    refused = models("calibrate", "mirrored", "--photos", "phone", code=3)
    note = "1 photos cannot be read and are left out: phone/damaged.heic (damaged or unsupported HEIC: "
    assert "phone has 1 usable faces" in refused and note in refused
    if any("int8" in precisions for precisions in available_precisions().values()):
        refused = models("quantize", "mirrored", "--photos", "phone", code=3)
        assert "they show 1 usable faces" in refused and note in refused


@pytest.mark.usefixtures("catalog")
@pytest.mark.long
def test_a_pulled_pack_is_quantized_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(quantization, "MAX_LANDMARK_SHIFT", 0.5)  # the bundled detector is no network for INT8
    if not any("int8" in precisions for precisions in available_precisions().values()):
        pytest.skip("this processor has no fast INT8")
    advice = "'kith models quantize mirrored --photos FOLDER'"
    assert advice in models("pull", "mirrored", "--accept-license")
    printed = models("quantize", "mirrored")
    assert re.search(r"recognition +\d+ of \d+ +\w+ +cosine to fp32 0\.9", printed)
    assert "ok" in models("verify", "mirrored")
    assert advice not in models("pull", "mirrored")
    assert "Replace them with --replace" in models("quantize", "mirrored", code=3)
    assert "bundled packs come with the INT8 files" in models("quantize", "kith-compact", code=3)


def test_the_default_catalog_lists_all_packs(models: Models) -> None:
    listed = {row["name"]: row for row in json.loads(models("list", "--json"))}
    assert listed["kith-compact"]["served"] and not listed["open-model-zoo"]["here"]
    assert (listed["kith-compact"]["commercial_use"], listed["buffalo_l"]["commercial_use"]) == (True, False)
    assert "detector: MIT (WIDER FACE)" in models("list")
    assert "MIT; trained on WIDER FACE" in models("show", "open-model-zoo")
    assert "pack_unknown" in models("verify", "missing", code=3)
    for arguments, told in (
        (("minifasnet",), "kith models pull --liveness minifasnet"),
        (("--liveness", "open-model-zoo"), "kith models pull open-model-zoo"),
        ((), "Name a pack"),
    ):
        assert told in models("pull", *arguments, code=2)


def test_a_pack_is_found_by_name_or_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def found(pack: str | Path) -> Path:
        return load_settings(pack=pack, models_dir="elsewhere").pack_paths[0]

    assert found("kith-compact") == found(BUNDLED_PACK) == BUNDLED_PACK
    assert found("missing") == Path("missing")
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    assert found("mine") == Path("elsewhere/mine")
    (tmp_path / "mine").mkdir()
    assert found("mine") == Path("mine")
