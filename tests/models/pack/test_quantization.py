"""Any pack gets INT8 files that lose little, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from models.engines.selection import EnginePreference, available_precisions, choose_engine, open_network
from models.errors import PackError
from models.pack import quantization
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.pack.quantization import Int8Result, choose_fp32_layers, quantize_pack
from models.vision.specs import NetworkSpec
from service.cli.tools.demo import varied_samples
from tests.packs import pack_in_openvinos_format

LAYERS = tuple("abcdefgh")


def additive(**losses: float) -> Callable[[frozenset[str]], float]:
    """Loss of a network whose quantized layers each add their own."""
    return lambda kept: sum(losses.get(name, 0.01) for name in LAYERS if name not in kept)


@pytest.mark.parametrize(
    ("losses", "limit_s", "kept"),
    [
        ({"a": 5.0}, 60, "a"),  # the sensitive layer is enough
        ({"c": 0.4, "g": 3.0}, 60, "ag"),
        ({"c": 0.5, "g": 3.0, "d": 0.3}, 60, "acg"),
        (dict.fromkeys(LAYERS, 2.0), 60, "aefgh"),  # at most half, besides the sensitive one
        ({"c": 3.0}, 0, "a"),  # no time to measure
    ],
)
def test_the_fewest_layers_stay_fp32(losses: dict[str, float], limit_s: float, kept: str) -> None:
    found = choose_fp32_layers(LAYERS, frozenset("a"), additive(**losses), limit_s)
    if kept == "aefgh":
        assert len(found) == len(kept)
    else:
        assert found == frozenset(kept)


def test_a_recognizer_in_openvinos_format_is_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="INT8 files are made of ONNX files"):
        quantize_pack(load_pack(pack_in_openvinos_format(tmp_path / "pack")), [])


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed does not count, no layer is searched for, and the bundled networks, not made for INT8, may lose much."""
    if not any("int8" in precisions for precisions in available_precisions().values()):
        pytest.skip("this processor has no fast INT8")
    monkeypatch.setattr(quantization, "MIN_SPEEDUP", 0.0)
    monkeypatch.setattr(quantization, "SEARCH_S", 0.0)
    monkeypatch.setattr(quantization, "MAX_LANDMARK_SHIFT", 0.5)
    monkeypatch.setattr(quantization, "MIN_MEAN_COSINE", 0.95)


@pytest.fixture
def plain(tmp_path: Path) -> ModelPack:
    """Pack without a manifest and without INT8."""
    (tmp_path / "plain").mkdir()
    for name in ("detector.onnx", "recognizer.onnx"):
        shutil.copy(BUNDLED_PACK / name, tmp_path / "plain" / name)
    return load_pack(tmp_path / "plain")


@pytest.mark.usefixtures("unlimited")
@pytest.mark.long
def test_a_pack_without_a_manifest_is_quantized_and_serves_int8(
    plain: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = list(varied_samples())
    results = quantize_pack(plain, photos, note="altered photos")
    assert [(result.task, result.accepted) for result in results] == [("detection", True), ("recognition", True)]
    made = load_pack(plain.directory)
    made.verify()
    assert made.recognition.fingerprint() == plain.recognition.fingerprint()
    specs: list[NetworkSpec] = [made.detection, made.recognition]
    for spec, result in zip(specs, results, strict=True):
        assert choose_engine(spec, EnginePreference(), available_precisions()).precision == "int8"
        assert "INT8 with a loss within the limits" in open_network(spec, EnginePreference()).reason
        assert 2 <= result.fp32_layers < result.layers / 2
    loss = results[1].engines[results[1].engine]
    assert 0.95 < loss["cosine"]["mean"] < 1

    # An interrupted quantization leaves the pack as it was.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quantization, "write_verified", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        quantize_pack(made, photos[::2])
    after = load_pack(plain.directory)
    after.verify()
    assert after.detection.int8 == made.detection.int8
    assert len(list((plain.directory / "int8").iterdir())) > 2

    # The next one removes what was left over. A network that loses too much loses its INT8 file.
    monkeypatch.setattr(quantization, "MAX_LANDMARK_SHIFT", 1e-6)
    detection, recognition = quantize_pack(made, photos)
    assert (detection.accepted, recognition.accepted) == (False, True)
    (file,) = (plain.directory / "int8").iterdir()
    assert file.name.startswith("recognizer-")
    assert load_pack(plain.directory).detection.int8 is None


@pytest.mark.parametrize(
    ("loses_little", "speedup", "accepted"), [(True, 1.2, True), (True, 1.0, False), (False, 9.0, False)]
)
def test_what_loses_too_much_or_is_no_faster_is_not_installed(
    loses_little: bool, speedup: float, accepted: bool
) -> None:
    result = Int8Result("recognition", 9, 2, "openvino", {"openvino": {"accepted": loses_little}}, speedup)
    assert result.accepted is accepted
