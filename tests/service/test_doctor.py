"""The doctor tells what overwrites what, and what really ran where."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from models.engines import abilities
from models.network import Engine, Precision
from models.pack import BUNDLED, load_pack
from service.cli import app
from service.doctor import diagnose, find_overwritten_gpu, find_rivals, installed_versions
from service.rates import Rate, advise, measure
from service.settings import load_settings
from tests.conftest import ROOT

GPU_PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_two_runtimes_are_an_error() -> None:
    (finding,) = find_rivals({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1", "faiss-cpu": "1"})
    assert finding.verdict == "error"
    assert "onnxruntime-gpu 1.31.1 overwrite each other" in finding.detail
    assert find_rivals({"onnxruntime-gpu": "1.31.1", "opencv-python-headless": "5"}) == []


def test_an_overwritten_gpu_runtime_is_an_error() -> None:
    (finding,) = find_overwritten_gpu({"onnxruntime-gpu": "1.31.1"}, ["CPUExecutionProvider"])
    assert finding.verdict == "error"
    assert find_overwritten_gpu({"onnxruntime-gpu": "1.31.1"}, GPU_PROVIDERS) == []
    assert find_overwritten_gpu({"onnxruntime": "1.31.1"}, ["CPUExecutionProvider"]) == []


def test_this_installation_is_sound() -> None:
    findings = diagnose(load_settings(engine=None))
    assert [f for f in findings if f.verdict != "ok"] == []
    assert {"detector.onnx", "recogniser.onnx"} <= {f.what for f in findings}
    assert any("nodes on OpenVINO" in f.detail for f in findings)
    assert any("nodes on CPUExecutionProvider" in f.detail for f in diagnose(load_settings(engine="onnxruntime")))


def test_openvino_alone_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where onnxruntime is not installed: its import fails, and nothing finds it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("models.runtime.is_installed", lambda: False)
    findings = diagnose(load_settings(engine=None))
    assert [f.what for f in findings if f.verdict == "error"] == []
    assert [f.what for f in findings if f.verdict == "warning"] == ["onnxruntime"]
    assert any("nodes on OpenVINO" in f.detail for f in findings)
    monkeypatch.setattr("service.doctor.openvino_is_installed", lambda: False)
    assert [f.what for f in diagnose(load_settings(engine=None)) if f.verdict == "error"] == ["onnxruntime"]


def test_a_broken_pack_is_an_error(tmp_path: object) -> None:
    findings = diagnose(load_settings(pack=tmp_path))
    assert any(f.what == "pack" and f.verdict == "error" for f in findings)


def test_no_extra_brings_a_second_runtime() -> None:
    """What docs/decisions/0002 promises: of our extras only 'cpu' may bring onnxruntime, only 'gpu' onnxruntime-gpu,
    and InsightFace, which would bring the other one, is in none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {Requirement(r).name for r in listed} for extra, listed in extras.items()}
    assert names["cpu"] == {"faiss-cpu", "onnxruntime", "openvino"}
    assert names["gpu"] == {"faiss-gpu", "onnxruntime-gpu"}
    # No dependency of ours, direct or not, asks for the CPU runtime behind the GPU extra's back.
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
    assert "onnxruntime" in {Requirement(r).name for r in requires("insightface") or []}, "the reason is gone"


def test_rates_of_every_engine_and_which_is_chosen() -> None:
    found = measure(load_pack(BUNDLED), load_settings())
    assert {(rate.network, rate.engine) for rate in found.rates if rate.precision == "fp32"} == {
        (network, engine) for network in ("detector.onnx", "recogniser.onnx") for engine in abilities()
    }
    assert [rate.network for rate in found.rates if rate.chosen] == ["detector.onnx", "recogniser.onnx"]
    assert all(min(rate.milliseconds) > 0 for rate in found.rates)


def test_where_a_gpu_is_wanted_its_own_bench_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.rates.ROUNDS", 1)
    found = measure(load_pack(BUNDLED), load_settings(device="gpu", precision="fp16"))
    assert "make bench-gpu" in found.advice
    assert not any(rate.chosen for rate in found.rates)


def rate(engine: Engine, precision: Precision, ms: float, lost: float | None = None, chosen: bool = False) -> Rate:
    return Rate("recogniser.onnx", engine, precision, (ms, ms), lost, chosen)


def test_advice_is_clearly_faster_and_harmless() -> None:
    chosen = rate("openvino", "bf16", 1.0, chosen=True)
    assert "as fast as any" in advise([chosen, rate("openvino", "fp32", 0.98)])
    assert "as fast as any" in advise([chosen, rate("openvino", "int8", 0.5, lost=0.2)])
    assert "as fast as any" in advise([chosen, rate("openvino", "int8", 0.5)])
    assert "KITH_ENGINE=openvino KITH_PRECISION=int8 needs 50%" in advise([chosen, rate("openvino", "int8", 0.5, 0.1)])


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    app(["doctor", "--json"], standalone_mode=False)
    assert all({"what", "verdict", "detail"} == set(finding) for finding in json.loads(capsys.readouterr().out))
