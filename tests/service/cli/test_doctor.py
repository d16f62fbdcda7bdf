"""The doctor reports conflicting packages and where each network runs."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from models.engines.selection import available_precisions
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Engine, Precision
from service.cli.main import app
from service.cli.tools import engine_benchmark
from service.cli.tools.doctor import check_conflicts, check_gpu_runtime, diagnose, installed_versions
from service.cli.tools.engine_benchmark import EngineRate, advise, measure
from service.settings import load_settings
from tests.conftest import ROOT

GPU_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_two_onnxruntime_packages_are_an_error() -> None:
    (check,) = check_conflicts({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1", "faiss-cpu": "1"})
    assert check.verdict == "error"
    assert "onnxruntime-gpu 1.31.1 overwrite each other" in check.detail
    assert check_conflicts({"onnxruntime-gpu": "1.31.1", "opencv-python-headless": "5"}) == []


def test_an_overwritten_gpu_runtime_is_an_error() -> None:
    (check,) = check_gpu_runtime({"onnxruntime-gpu": "1.31.1"}, ["CPUExecutionProvider"])
    assert check.verdict == "error"
    assert check_gpu_runtime({"onnxruntime-gpu": "1.31.1"}, GPU_PROVIDERS) == []
    assert check_gpu_runtime({"onnxruntime": "1.31.1"}, ["CPUExecutionProvider"]) == []


def test_this_installation_is_sound() -> None:
    checks = diagnose(load_settings(engine=None))
    assert [c for c in checks if c.verdict != "ok"] == []
    assert {"detector.onnx", "recognizer.onnx"} <= {c.what for c in checks}
    assert any("nodes on OpenVINO" in c.detail for c in checks)
    assert any("nodes on CPUExecutionProvider" in c.detail for c in diagnose(load_settings(engine="onnxruntime")))


def test_openvino_suffices_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = diagnose(load_settings(engine=None))
    assert [c.what for c in checks if c.verdict == "error"] == []
    assert [c.what for c in checks if c.verdict == "warning"] == ["onnxruntime"]
    assert any("nodes on OpenVINO" in c.detail for c in checks)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert [c.what for c in diagnose(load_settings(engine=None)) if c.verdict == "error"] == ["onnxruntime"]


def test_a_broken_pack_is_an_error(tmp_path: object) -> None:
    checks = diagnose(load_settings(pack=tmp_path))
    assert any(c.what == "pack" and c.verdict == "error" for c in checks)


def test_no_extra_installs_a_second_runtime() -> None:
    """Only the extra 'cpu' installs onnxruntime, and only 'gpu' onnxruntime-gpu (docs/decisions/0002)."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {Requirement(r).name for r in listed} for extra, listed in extras.items()}
    assert names["cpu"] == {"faiss-cpu", "onnxruntime", "openvino"}
    assert names["gpu"] == {"faiss-gpu", "onnxruntime-gpu"}
    # No direct or transitive dependency installs the CPU runtime beside the GPU extra.
    waiting = [
        Requirement(r).name for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    seen: set[str] = set()
    installed = installed_versions()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen or name not in installed:
            continue
        seen.add(name)
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    assert "torch" not in seen
    assert not seen & {"onnxruntime", "onnxruntime-gpu", "insightface", "opencv-python"}
    assert "onnxruntime" in {Requirement(r).name for r in requires("insightface") or []}, (
        "insightface could be a dependency now"
    )


@pytest.mark.long
def test_every_engine_is_measured_and_the_default_marked() -> None:
    found = measure(load_pack(BUNDLED_PACK), load_settings())
    assert {(rate.network, rate.engine) for rate in found.rates if rate.precision == "fp32"} == {
        (network, engine) for network in ("detector.onnx", "recognizer.onnx") for engine in available_precisions()
    }
    assert [rate.network for rate in found.rates if rate.chosen] == ["detector.onnx", "recognizer.onnx"]
    assert all(min(rate.milliseconds) > 0 for rate in found.rates)


def test_int8_is_offered_for_packs_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_benchmark, "_measure", lambda *_: [])
    monkeypatch.setattr(engine_benchmark, "has_fast_int8", lambda: True)
    for name in ("detector.onnx", "recognizer.onnx"):
        shutil.copy(BUNDLED_PACK / name, tmp_path / name)
    assert f"`kith models quantize {tmp_path} --photos FOLDER`" in measure(load_pack(tmp_path), load_settings()).advice
    assert "quantize" not in measure(load_pack(BUNDLED_PACK), load_settings()).advice


def test_the_gpu_benchmark_is_named_if_a_gpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_benchmark, "ROUNDS", 1)
    monkeypatch.setattr(engine_benchmark, "ROUND_S", 0)
    found = measure(load_pack(BUNDLED_PACK), load_settings(device="gpu", precision="fp16"))
    assert "make bench-gpu" in found.advice
    assert not any(rate.chosen for rate in found.rates)


def rate(engine: Engine, precision: Precision, ms: float, accurate: bool = True, chosen: bool = False) -> EngineRate:
    return EngineRate("recognizer.onnx", engine, precision, (ms, ms), "0.1 points", accurate, chosen)


def test_only_clearly_faster_and_accurate_settings_are_recommended() -> None:
    chosen = rate("openvino", "bf16", 1.0, chosen=True)
    assert "as fast as any" in advise([chosen, rate("openvino", "fp32", 0.98)])
    assert "as fast as any" in advise([chosen, rate("openvino", "int8", 0.5, accurate=False)])
    assert "KITH_ENGINE=openvino KITH_PRECISION=int8 needs 50%" in advise([chosen, rate("openvino", "int8", 0.5)])


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    app(["doctor", "--json"], standalone_mode=False)
    assert all({"what", "verdict", "detail"} == set(check) for check in json.loads(capsys.readouterr().out))
