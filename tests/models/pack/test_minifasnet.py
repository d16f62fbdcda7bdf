"""The converted liveness network computes what its two networks compute in torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from models.pack.manifest import load_liveness
from models.pack.minifasnet import FACE_SIZES, THRESHOLD, to_onnx, write_minifasnet
from models.pack.torch_file import TorchFileError
from models.pack.verification import run_liveness
from models.vision.specs import BoxCrops, Normalization


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int, kernel: int = 1, stride: int = 1, depthwise: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=before if depthwise else 1, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.prelu = nn.PReLU(after)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.prelu(self.bn(self.conv(x)))
        return out


class LinearBlock(nn.Module):
    def __init__(self, before: int, after: int, kernel: int = 1, depthwise: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, groups=before if depthwise else 1, bias=False)
        self.bn = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return out


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Conv2d(width, width // 4, 1, bias=False), nn.BatchNorm2d(width // 4)
        self.fc2, self.bn2 = nn.Conv2d(width // 4, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.relu(self.bn1(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(self.bn2(self.fc2(pooled)))


class DepthWise(nn.Module):
    def __init__(self, before: int, inner: int, after: int, stride: int = 1, squeeze: bool = False) -> None:
        super().__init__()
        self.conv, self.conv_dw = ConvBlock(before, inner), ConvBlock(inner, inner, 3, stride, depthwise=True)
        self.project = LinearBlock(inner, after)
        self.residual = stride == 1
        if squeeze:
            self.se_module = Squeeze(after)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.conv_dw(self.conv(x)))
        if hasattr(self, "se_module"):
            out = self.se_module(out)
        return x + out if self.residual else out


class Blocks(nn.Module):
    def __init__(self, width: int, count: int, squeeze: bool) -> None:
        super().__init__()
        last = [squeeze and number == count - 1 for number in range(count)]
        self.model = nn.Sequential(*(DepthWise(width, 5, width, squeeze=each) for each in last))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class SmallFASNet(nn.Module):
    """MiniFASNet, or with ``squeeze`` MiniFASNetSE, with fewer channels."""

    def __init__(self, squeeze: bool) -> None:
        super().__init__()
        self.conv1, self.conv2_dw = ConvBlock(3, 8, 3, 2), ConvBlock(8, 8, 3, depthwise=True)
        self.conv_23, self.conv_3 = DepthWise(8, 9, 8, 2), Blocks(8, 2, squeeze)
        self.conv_34, self.conv_4 = DepthWise(8, 7, 12, 2), Blocks(12, 3, squeeze)
        self.conv_45, self.conv_5 = DepthWise(12, 11, 12, 2), Blocks(12, 1, squeeze)
        self.conv_6_sep = ConvBlock(12, 16)
        self.conv_6_dw = LinearBlock(16, 16, 5, depthwise=True)
        self.linear, self.bn = nn.Linear(16, 6, bias=False), nn.BatchNorm1d(6)
        self.prob = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_3(self.conv_23(self.conv2_dw(self.conv1(x))))
        x = self.conv_5(self.conv_45(self.conv_4(self.conv_34(x))))
        x = self.conv_6_dw(self.conv_6_sep(x))
        return torch.softmax(self.prob(self.bn(self.linear(x.flatten(1)))), 1)


def random_network(seed: int, squeeze: bool) -> SmallFASNet:
    torch.manual_seed(seed)
    network = SmallFASNet(squeeze)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = 1.0
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.1)
        elif isinstance(layer, nn.PReLU):
            nn.init.uniform_(layer.weight, -0.5, 0.5)
    with torch.no_grad():
        network(255 * torch.rand(16, 3, 5, 5).repeat_interleave(16, 2).repeat_interleave(16, 3))  # running statistics
    return network.eval()


def content(network: nn.Module, drop: str | None = None) -> bytes:
    """Return the authors' form of the weights: trained by DataParallel, saved by torch before 1.6."""
    state: dict[str, Any] = {f"module.{name}": value for name, value in network.state_dict().items() if name != drop}
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_the_score_is_the_mean_of_both_networks(rng: np.random.Generator) -> None:
    networks = random_network(0, squeeze=False), random_network(1, squeeze=True)
    model = to_onnx([content(network) for network in networks])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    colors = rng.integers(0, 256, (5, 3, 4, 8)).astype(np.float32)
    crops = np.repeat(np.repeat(colors, 20, axis=2), 20, axis=3)
    (scores,) = session.run(None, {"input": crops})
    with torch.no_grad():
        halves = [network(torch.from_numpy(crops[..., 80 * i : 80 * i + 80])) for i, network in enumerate(networks)]
    expected = (halves[0] + halves[1])[:, 1:2] / 2
    assert scores.std() > 0.001
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)


def test_the_written_network_has_the_crops_of_its_authors(tmp_path: Path) -> None:
    folder = tmp_path / "network"
    folder.mkdir()
    files = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for seed, file in enumerate(files):
        file.write_bytes(content(random_network(seed, squeeze=bool(seed))))
    write_minifasnet(folder, files)
    spec = load_liveness(folder)
    assert (spec.crop, spec.shape) == (BoxCrops(80, FACE_SIZES), (80, 160))
    assert (spec.normalization, spec.live_class) == (Normalization(0.0, 1.0, "BGR"), None)
    assert spec.threshold == THRESHOLD
    assert run_liveness(folder) == "the liveness network ran"


def test_other_weights_are_rejected() -> None:
    network = random_network(0, squeeze=False)
    with pytest.raises(TorchFileError, match=r"no finite conv_34\.conv_dw\.bn\.running_var"):
        to_onnx([content(network, drop="conv_34.conv_dw.bn.running_var")] * 2)
    network.conv_6_sep.conv = nn.Conv2d(12, 15, 1, bias=False)
    with pytest.raises(TorchFileError, match="conv_6_sep is not a convolution"):
        to_onnx([content(network)] * 2)
