"""Engine selection picks the fastest precision with a small measured loss, or the pinned one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from models.engines import selection
from models.engines.selection import (
    EngineChoice,
    EnginePreference,
    PrecisionsByEngine,
    choose_engine,
    open_fp32,
    open_network,
    open_networks,
)
from models.errors import PackError, RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import INT8_FILE
from models.runtime import openvino_network
from models.runtime.network import Engine, Float
from models.runtime.openvino_network import OpenVinoNetwork
from models.vision.recognition import Recognizer
from models.vision.specs import Int8File, RecognitionSpec
from tests.packs import pack_in_openvinos_format, pack_with_int8

BOTH: PrecisionsByEngine = {"openvino": {"fp32", "bf16", "int8"}, "onnxruntime": {"fp32", "int8"}}
OLD: PrecisionsByEngine = {"openvino": {"fp32"}, "onnxruntime": {"fp32"}}


def spec(int8: Mapping[Engine, bool] | None = None) -> RecognitionSpec:
    """Return the bundled recognizer with an INT8 file that is accurate on some engines; None: without."""
    engines = {engine: {"accepted": accurate} for engine, accurate in (int8 or {}).items()}
    file = None if int8 is None else Int8File(BUNDLED_PACK / "recognizer.onnx", "0" * 64, "0" * 64, engines)
    return replace(load_pack(BUNDLED_PACK).recognition, int8=file)


ACCURATE: Final[Mapping[Engine, bool]] = {"openvino": True, "onnxruntime": True}
INACCURATE: Final[Mapping[Engine, bool]] = {"openvino": False, "onnxruntime": False}


@pytest.mark.parametrize(
    ("int8", "preference", "available", "engine", "chosen"),
    [
        (ACCURATE, EnginePreference(), BOTH, "openvino", "int8"),
        (INACCURATE, EnginePreference(), BOTH, "openvino", "bf16"),
        (None, EnginePreference(), BOTH, "openvino", "bf16"),
        (ACCURATE, EnginePreference(), OLD, "openvino", "fp32"),
        (ACCURATE, EnginePreference(engine="onnxruntime"), BOTH, "onnxruntime", "int8"),
        # Other kernels round differently, so that one file can be accurate on one engine only.
        ({"openvino": True, "onnxruntime": False}, EnginePreference(), BOTH, "openvino", "int8"),
        ({"openvino": True}, EnginePreference(engine="onnxruntime"), BOTH, "onnxruntime", "fp32"),
        (ACCURATE, EnginePreference(provider="CPUExecutionProvider"), BOTH, "onnxruntime", "int8"),
        (ACCURATE, EnginePreference(precision="fp32"), BOTH, "openvino", "fp32"),
        (INACCURATE, EnginePreference(precision="int8"), OLD, "openvino", "int8"),
        (None, EnginePreference(precision="int8"), BOTH, "openvino", "bf16"),
        (ACCURATE, EnginePreference(), {"onnxruntime": {"fp32"}}, "onnxruntime", "fp32"),
        (None, EnginePreference(engine="openvino"), {"onnxruntime": {"fp32"}}, None, "openvino is not installed"),
        (None, EnginePreference(engine="onnxruntime", precision="bf16"), BOTH, None, "onnxruntime has no bf16"),
        (None, EnginePreference(engine="openvino", provider="CPUExecutionProvider"), BOTH, None, "KITH_RUNTIME"),
    ],
)
def test_the_fastest_accurate_precision_is_chosen_unless_another_is_pinned(
    int8: Mapping[Engine, bool] | None,
    preference: EnginePreference,
    available: PrecisionsByEngine,
    engine: Engine | None,
    chosen: str,
) -> None:
    if engine is None:
        with pytest.raises(RuntimeUnavailableError, match=chosen):
            choose_engine(spec(int8), preference, available)
        return
    choice = choose_engine(spec(int8), preference, available)
    assert (choice.engine, choice.precision) == (engine, chosen)
    assert choice.reason


def test_only_other_packs_are_run_in_every_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled shapes take memory, and the bundled pack needs no check."""
    shapes, counts = set[tuple[int, ...]](), []

    class Recording(OpenVinoNetwork):
        def run(self, batch: Float) -> list[Float]:
            shapes.add(batch.shape)
            return super().run(batch)

    monkeypatch.setattr(selection, "OpenVinoNetwork", Recording)
    for folder in (BUNDLED_PACK, Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))):
        shapes.clear()
        open_network(load_pack(folder).detection, EnginePreference(engine="openvino", precision="fp32"))
        counts.append(len(shapes))
    assert counts == [1, 2]


def test_a_pinned_precision_may_be_slow_but_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine(spec(), EnginePreference(), OLD).precision == "fp32"
    for supported in ({"fp32", "bf16"}, {"fp32"}):
        monkeypatch.setattr(openvino_network, "supported_precisions", partial(frozenset, supported))
        with nullcontext() if "bf16" in supported else pytest.raises(RuntimeUnavailableError, match="has no bf16 on"):
            assert choose_engine(spec(), EnginePreference(precision="bf16"), OLD).precision == "bf16"


def test_int8_files_load_and_keep_the_fingerprint(tmp_path: Path) -> None:
    directory = pack_with_int8(tmp_path / "varied")
    pack = load_pack(directory)
    pack.verify()
    assert pack.recognition.fingerprint() == load_pack(BUNDLED_PACK).recognition.fingerprint()
    opened = (open_network(pack.recognition, EnginePreference(precision=precision)) for precision in ("int8", "fp32"))
    assert [pack.name_of(network.path) for network in opened] == ["int8/recognizer.onnx", "recognizer.onnx"]
    reason = "the pack has INT8 with a loss within the limits"
    assert choose_engine(pack.recognition, EnginePreference(), BOTH) == EngineChoice("openvino", "int8", reason)


def test_a_recognizer_in_openvinos_format_is_served_by_openvino_alone(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, original = load_pack(pack_in_openvinos_format(tmp_path / "pack")), load_pack(BUNDLED_PACK).recognition
    network = open_network(pack.recognition, EnginePreference(precision="fp32"))
    assert network.engine == "openvino"
    crops = rng.integers(0, 256, (3, 112, 112, 3), np.uint8)
    expected = Recognizer(open_fp32(original.path), original).embed(crops)
    for found in (network, open_fp32(pack.recognition.path)):
        cosines = (Recognizer(found, pack.recognition).embed(crops) * expected).sum(axis=1)
        assert cosines.min() > 0.9999
    without: PrecisionsByEngine = {"onnxruntime": {"fp32"}}
    for preference, available in (
        (EnginePreference(engine="onnxruntime"), without),
        (EnginePreference(), without),
        (EnginePreference(provider="CPUExecutionProvider"), OLD),
    ):
        with pytest.raises(RuntimeUnavailableError, match=r"only OpenVINO runs recognizer\.xml"):
            choose_engine(pack.recognition, preference, available)
    monkeypatch.setattr(selection, "diagnose_cuda", lambda: None)
    monkeypatch.setattr(selection, "visible_gpus", lambda: ["NVIDIA H200"])
    opened = open_networks(pack.recognition, EnginePreference(device="gpu"))
    assert "recognizer.xml: is in OpenVINO's format, which only OpenVINO runs, on CPUs" in str(opened.gpu_error)
    monkeypatch.setattr(selection, "OpenVinoNetwork", FailingOpenVinoNetwork)
    with pytest.raises(RuntimeUnavailableError, match="OpenVINO cannot run it"):
        open_network(pack.recognition, EnginePreference())


def test_the_weights_of_openvinos_format_count_as_the_recognizer(tmp_path: Path) -> None:
    directory = pack_in_openvinos_format(tmp_path / "pack")
    pack, weights = load_pack(directory), directory / "recognizer.bin"
    pack.verify()
    fingerprint, content = pack.recognition.fingerprint(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert pack.recognition.fingerprint() != fingerprint
    with pytest.raises(PackError, match="the manifest says"):
        pack.verify()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(PackError, match="cannot be opened by OpenVINO"):
        open_network(pack.recognition, EnginePreference())
    weights.unlink()
    with pytest.raises(PackError, match=r"recognizer\.bin' does not exist in the pack"):
        load_pack(directory)


class FailingOpenVinoNetwork(OpenVinoNetwork):
    def run(self, batch: Float) -> list[Float]:
        raise RuntimeUnavailableError("OpenVINO cannot run it")


def test_the_fallback_from_openvino_keeps_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recognition = load_pack(pack_with_int8(tmp_path / "varied")).recognition
    monkeypatch.setattr(selection, "OpenVinoNetwork", FailingOpenVinoNetwork)
    monkeypatch.setattr(selection, "available_precisions", lambda only=None: BOTH)
    chosen = open_network(recognition, EnginePreference())
    assert (chosen.engine, chosen.precision, chosen.path.parent.name) == ("onnxruntime", "int8", "int8")
    assert chosen.reason.startswith("OpenVINO cannot run this file; the pack has INT8")
    pinned = open_network(recognition, EnginePreference(precision="fp32"))
    assert (pinned.engine, pinned.precision) == ("onnxruntime", "fp32")
    with pytest.raises(RuntimeUnavailableError, match="OpenVINO cannot run it"):
        open_network(recognition, EnginePreference(precision="bf16"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": "0" * 64}, "int8.recognition.sha256"),
        ({"of": "0" * 64}, "int8.recognition.of"),
        ({"of": None}, "int8.recognition.of"),
        ({"file": "int8/other.onnx"}, "int8.recognition.file"),
        ({"engines": {"openvino": 3}}, "int8.recognition.engines.openvino"),
    ],
)
def test_an_int8_file_of_another_network_is_rejected(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    directory = pack_with_int8(tmp_path / "varied")
    listed = json.loads((directory / INT8_FILE).read_text())
    listed["recognition"] |= change
    (directory / INT8_FILE).write_text(json.dumps(listed))
    with pytest.raises(PackError) as refused:
        load_pack(directory).verify()
    assert refused.value.field == field
