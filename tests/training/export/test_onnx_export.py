"""Exports agree with torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from models.pack.manifest import ModelPack
from models.runtime.onnx_files import restore_fp32_weights
from models.runtime.onnx_runtime import OnnxNetwork
from training.backbones import build_backbone
from training.backbones.iresnet import ThinIResNet
from training.config import BackboneConfig, BackboneName
from training.errors import ParityError
from training.export import onnx_export
from training.export.onnx_export import export_recognizer
from training.optimization.loop import to_tensor

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["thin_iresnet", "iresnet18", "mobilefacenet"])
def test_an_export_agrees_with_torch_and_is_small(tmp_path: Path, name: BackboneName, rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    crops, backbone = (
        to_tensor(rng.integers(0, 255, (12, 112, 112, 3), dtype=np.uint8)),
        build_backbone(BackboneConfig(name)),
    )
    backbone(crops)  # give batch norm statistics of its own
    assert export_recognizer(backbone, crops, tmp_path / "r.onnx", {}) >= 0.999
    assert (tmp_path / "r.onnx").stat().st_size < 2.1 * sum(p.numel() for p in backbone.parameters()) + 200_000
    network = OnnxNetwork(tmp_path / "r.onnx")
    assert network.output_names == ["embedding"]
    with torch.no_grad():
        expected = backbone.eval()(crops).numpy()
    assert np.abs(network.run(crops.numpy())[0] - expected).max() < 0.02 * np.abs(expected).max()


def test_restored_fp32_weights_give_equal_results(pack: ModelPack, tmp_path: Path, rng: np.random.Generator) -> None:
    restore_fp32_weights(pack.recognition.path, tmp_path / "wide.onnx")
    graph = onnx.load(str(tmp_path / "wide.onnx")).graph
    assert {tensor.data_type for tensor in graph.initializer} & {onnx.TensorProto.FLOAT16} == set()
    assert "Cast" not in {node.op_type for node in graph.node}
    assert (tmp_path / "wide.onnx").stat().st_size > 1.8 * pack.recognition.path.stat().st_size
    crops = rng.normal(size=(3, 3, 112, 112)).astype(np.float32)
    fp16_weights, wide = (OnnxNetwork(path).run(crops)[0] for path in (pack.recognition.path, tmp_path / "wide.onnx"))
    assert wide == pytest.approx(fp16_weights, abs=1e-5)


def test_a_parity_error_leaves_no_file(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops = to_tensor(rng.integers(0, 255, (12, 112, 112, 3), dtype=np.uint8))
    monkeypatch.setattr(onnx_export, "MIN_COSINE_FP16", 1.1)
    with pytest.raises(ParityError, match="fp16"):
        export_recognizer(ThinIResNet(), crops, tmp_path / "r.onnx", {})
    assert list(tmp_path.iterdir()) == []
