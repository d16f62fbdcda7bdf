"""The doctor reports conflicting packages and where each network runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from models.engines import selection
from models.engines.selection import EnginePreference, OpenedNetworks, open_networks
from models.pack.loading import load_pack
from models.vision.specs import DetectionSpec, NetworkSpec
from service.cli.tools.doctor import check_conflicts, check_gpu_runtime, check_gpus, diagnose
from service.settings import load_settings
from tests.packs import pack_in_openvinos_format
from tests.service.cli.conftest import Program

GPU_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_two_or_an_overwritten_onnxruntime_are_errors() -> None:
    (check,) = check_conflicts({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1", "faiss-cpu": "1"})
    assert check.verdict == "error"
    assert "onnxruntime-gpu 1.31.1 overwrite each other" in check.detail
    assert check_conflicts({"onnxruntime-gpu": "1.31.1", "opencv-python-headless": "5"}) == []
    (check,) = check_gpu_runtime({"onnxruntime-gpu": "1.31.1"}, ["CPUExecutionProvider"])
    assert check.verdict == "error"
    assert check_gpu_runtime({"onnxruntime-gpu": "1.31.1"}, GPU_PROVIDERS) == []
    assert check_gpu_runtime({"onnxruntime": "1.31.1"}, ["CPUExecutionProvider"]) == []


def test_this_installation_is_sound(local: Program, tmp_path: Path) -> None:
    del local.environment["KITH_RUNTIME"]
    checks = json.loads(local("doctor", "--json"))
    assert [
        check for check in checks if check.keys() != {"what", "verdict", "detail"} or check["verdict"] != "ok"
    ] == []
    assert {"detector.onnx", "recognizer.onnx"} <= {check["what"] for check in checks}
    assert any("nodes on OpenVINO" in check["detail"] for check in checks)
    assert any("nodes on CPUExecutionProvider" in c.detail for c in diagnose(load_settings(runtime="onnxruntime")))
    assert any(c.what == "pack" and c.verdict == "error" for c in diagnose(load_settings(pack=tmp_path)))


def test_openvino_suffices_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = diagnose(load_settings(runtime=None))
    assert [c.what for c in checks if c.verdict == "error"] == []
    assert [c.what for c in checks if c.verdict == "warning"] == ["onnxruntime"]
    assert any("nodes on OpenVINO" in c.detail for c in checks)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert [c.what for c in diagnose(load_settings(runtime=None)) if c.verdict == "error"] == ["onnxruntime"]


def test_a_recognizer_that_gpus_do_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "diagnose_cuda", lambda: None)
    monkeypatch.setattr(selection, "visible_gpus", lambda: ["NVIDIA H200"])
    settings = load_settings(device="gpu", runtime=None)
    monkeypatch.setattr("service.cli.tools.doctor.open_networks", without_detector)
    *_, check = check_gpus(settings, [load_pack(pack_in_openvinos_format(tmp_path / "pack"))])
    assert (check.what, check.verdict) == ("gpu", "error")
    assert "recognizer.xml: is in OpenVINO's format, which only OpenVINO runs" in check.detail


def without_detector(spec: NetworkSpec, wish: EnginePreference) -> OpenedNetworks:
    """Open a recognizer; a detector would need a GPU."""
    return OpenedNetworks([]) if isinstance(spec, DetectionSpec) else open_networks(spec, wish)
