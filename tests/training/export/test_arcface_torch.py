"""Weights of arcface_torch give equal outputs here, weights from here give equal outputs there, and runs go on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from tests.training.runs import PEOPLE, tiny_run, write_people
from training.backbones.iresnet import DEPTHS
from training.cli.commands import app
from training.config import BackboneConfig, BackboneName, ConfigError, RunConfig
from training.evaluation.embedding import load_embedder
from training.export import packing
from training.export.arcface_torch import export_weights, import_weights
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, load_run
from training.run.train import train_recognizer


class Reference:
    """Layers by functions and by arcface_torch's names. A layer that has no weights yet gets random ones."""

    def __init__(self, weights: dict[str, Tensor] | None = None) -> None:
        self.weights, self.random = weights or {}, torch.Generator().manual_seed(3)

    def get(self, name: str, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        if name not in self.weights:
            self.weights[name] = torch.rand(shape, generator=self.random) * (high - low) + low
        return self.weights[name]

    def conv(
        self, name: str, x: Tensor, channels: int, size: int, stride: int, groups: int = 1, pad: int = -1
    ) -> Tensor:
        fan_in = x.shape[1] // groups
        bound = (3 / (fan_in * size * size)) ** 0.5
        weight = self.get(f"{name}.weight", channels, fan_in, size, size, low=-bound, high=bound)
        return F.conv2d(x, weight, None, stride, size // 2 if pad < 0 else pad, 1, groups)

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean, var = (self.get(f"{name}.running_{n}", x.shape[1], low=0.5, high=1) for n in ("mean", "var"))
        weight, bias = (self.get(f"{name}.{n}", x.shape[1], low=0.5) for n in ("weight", "bias"))
        self.weights.setdefault(f"{name}.num_batches_tracked", torch.tensor(7))
        return F.batch_norm(x, mean, var, weight, bias)

    def prelu(self, name: str, x: Tensor) -> Tensor:
        return F.prelu(x, self.get(f"{name}.weight", x.shape[1], low=0.1, high=0.3))

    def linear(self, name: str, x: Tensor, features: int, bias: bool) -> Tensor:
        bound = x.shape[1] ** -0.5
        weight = self.get(f"{name}.weight", features, x.shape[1], low=-bound, high=bound)
        return F.linear(x, weight, self.get(f"{name}.bias", features) if bias else None)


def iresnet(net: Reference, x: Tensor, layers: Sequence[int], features: int) -> Tensor:
    x = net.prelu("prelu", net.norm("bn1", net.conv("conv1", x, 64, 3, 1)))
    for i, count in enumerate(layers):
        for j in range(count):
            name, channels, stride = f"layer{i + 1}.{j}", 64 << i, 2 if j == 0 else 1
            same = x
            if j == 0:
                same = net.norm(f"{name}.downsample.1", net.conv(f"{name}.downsample.0", x, channels, 1, stride))
            out = net.conv(f"{name}.conv1", net.norm(f"{name}.bn1", x), channels, 3, 1)
            out = net.prelu(f"{name}.prelu", net.norm(f"{name}.bn2", out))
            x = net.norm(f"{name}.bn3", net.conv(f"{name}.conv2", out, channels, 3, stride)) + same
    return net.norm("features", net.linear("fc", net.norm("bn2", x).flatten(1), features, bias=True))


def mobilefacenet(net: Reference, x: Tensor, scale: int, features: int) -> Tensor:
    def block(name: str, x: Tensor, channels: int, size: int, stride: int, groups: int) -> Tensor:
        x = net.conv(f"{name}.layers.0", x, channels, size, stride, groups)
        return net.prelu(f"{name}.layers.2", net.norm(f"{name}.layers.1", x))

    def depthwise(name: str, x: Tensor, channels: int, stride: int, groups: int) -> Tensor:
        x = block(f"{name}.layers.0", x, groups, 1, 1, 1)
        x = block(f"{name}.layers.1", x, groups, 3, stride, groups)
        x = net.conv(f"{name}.layers.2.layers.0", x, channels, 1, 1)
        return net.norm(f"{name}.layers.2.layers.1", x)

    x = block("layers.0", x, 64 * scale, 3, 2, 1)
    x = block("layers.1", x, 64 * scale, 3, 1, 64)
    for layer, channels, wide, count, groups in ((2, 64, 128, 4, 128), (4, 128, 256, 6, 256), (6, 128, 512, 2, 256)):
        x = depthwise(f"layers.{layer}", x, channels * scale, 2, wide)
        for i in range(count):
            x = x + depthwise(f"layers.{layer + 1}.layers.{i}", x, channels * scale, 1, groups)
    x = block("conv_sep", x, 512, 1, 1, 1)
    x = net.norm("features.layers.0.layers.1", net.conv("features.layers.0.layers.0", x, 512, 7, 1, 512, pad=0))
    x = net.linear("features.layers.2", x.flatten(1), features, bias=False)
    return net.norm("features.layers.3", x)


def outputs(net: Reference, name: str, x: Tensor, features: int = 32, scale: int = 2) -> Tensor:
    if name == "mobilefacenet":
        return mobilefacenet(net, x, scale, features)
    return iresnet(net, x, DEPTHS[name], features)


def noise(side: int = 112) -> Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


def equal(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


DEEP = [pytest.param(name, marks=pytest.mark.long) for name in DEPTHS if name != "iresnet18"]


@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", *DEEP])
@torch.no_grad()
def test_outputs_are_equal_both_ways(tmp_path: Path, name: BackboneName) -> None:
    net, side = Reference(), 112 if name == "mobilefacenet" else 48
    wanted = outputs(net, name, noise(side))
    torch.save(net.weights, tmp_path / "model.pt")
    assert import_weights(tmp_path / "model.pt", name, tmp_path / "run") is None
    config, network = load_run(tmp_path / "run")
    equal(network(noise(side)), wanted)
    assert (config.backbone.embedding_dim, config.data.crop_px) == (32, side)
    export_weights(tmp_path / "run", tmp_path / "out" / "model.pt", classes=False)
    back = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert back.keys() == net.weights.keys()
    equal(outputs(Reference(back), name, noise(side)), wanted)


def small(folder: Path, classes: int | None = None, ranks: int = 1) -> tuple[Path, Reference]:
    """Write weights of a narrow MobileFaceNet, as one file or with classes as the checkpoints of ranks."""
    net = Reference()
    with torch.no_grad():
        outputs(net, "mobilefacenet", noise(), features=16, scale=1)
    if classes is None:
        torch.save(net.weights, folder / "model.pt")
        return folder / "model.pt", net
    for rank, part in enumerate(net.get("centers", classes, 16).tensor_split(ranks)):
        document = {
            "epoch": 1,
            "state_dict_backbone": {k: v for k, v in net.weights.items() if k != "centers"},
            "state_dict_softmax_fc": {"weight": part.clone()},
            "state_optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
            "state_lr_scheduler": {"base_lrs": [0.1], "total_iters": 10},
        }
        torch.save(document, folder / f"checkpoint_gpu_{rank}.pt")
    return folder / "checkpoint_gpu_0.pt", net


def continued(tmp_path: Path, class_sampling: float = 0.0) -> RunConfig:
    backbone = BackboneConfig("mobilefacenet", embedding_dim=16, weights=tmp_path / "imported")
    base = tiny_run(write_people(tmp_path / "people", images=2, side=112), tmp_path / "run", "cosface", epochs=1)
    loop = replace(base.loop, learning_rate=1e-9, class_sampling=class_sampling)
    return replace(base, data=replace(base.data, crop_px=112), backbone=backbone, loop=loop)


def test_a_run_continues_with_weights_and_class_centers(tmp_path: Path) -> None:
    path, net = small(tmp_path, PEOPLE, ranks=4)
    assert import_weights(path, "mobilefacenet", tmp_path / "imported") == PEOPLE
    config = continued(tmp_path, class_sampling=1.0)
    checkpoint = train_recognizer(config)
    trained = checkpoint.backbone.state_dict()
    equal(trained["stem.0.0.weight"], net.weights["layers.0.layers.0.weight"])
    equal(trained["head.3.weight"], net.weights["features.layers.2.weight"])
    state = load_checkpoint(config.output / CHECKPOINT)
    equal(state["head"]["weight"], net.weights["centers"])
    (tmp_path / "imported" / CHECKPOINT).unlink()
    train_recognizer(config)  # a started run does not need them again
    export_weights(config.output, tmp_path / "back.pt", classes=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    equal(back["state_dict_softmax_fc"]["weight"], net.weights["centers"])
    assert back["state_dict_backbone"].keys() == net.weights.keys() - {"centers"}


def test_centers_of_other_people_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = small(tmp_path, PEOPLE + 1)
    import_weights(path, "mobilefacenet", tmp_path / "imported")
    with caplog.at_level("INFO"):
        train_recognizer(continued(tmp_path))
    assert f"the {PEOPLE + 1} class centers" in caplog.text


def test_imported_weights_are_measured_and_exported_and_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small(tmp_path)
    answer = CliRunner().invoke(
        app, ["import-weights", str(path), "--backbone", "mobilefacenet", "--output", str(tmp_path / "imported")]
    )
    assert (answer.exit_code, "without class centers" in answer.output) == (0, True)
    embed, _ = load_embedder(tmp_path / "imported")
    assert embed(torch.zeros(1, 112, 112, 3, dtype=torch.uint8).numpy()).shape == (1, 16)
    compared: list[Tensor] = []
    monkeypatch.setattr(packing, "export_recognizer", lambda network, crops, *_: compared.append(crops))
    packing.export_run(tmp_path / "imported", tmp_path / "recognizer.onnx", "fp32")
    assert compared[0].shape == (32, 3, 112, 112)
    assert compared[0].std() > 0.5  # noise, without photos
    config, _ = load_run(tmp_path / "imported")
    with pytest.raises(ConfigError, match=r"--set backbone\.weights"):
        train_recognizer(config)
    with pytest.raises(ConfigError, match="no class centers"):
        export_weights(tmp_path / "imported", tmp_path / "back.pt", classes=True)
    with pytest.raises(ConfigError, match="has a checkpoint"):
        import_weights(path, "mobilefacenet", tmp_path / "imported")


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch attacked",)


def test_files_that_are_no_such_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, net = small(tmp_path)
    output = tmp_path / "imported"
    with pytest.raises(ConfigError, match="no iresnet18"):
        import_weights(path, "iresnet18", output)
    torch.save({**net.weights, "layers.9.weight": torch.ones(1)}, tmp_path / "more.pt")
    with pytest.raises(ConfigError, match=r"layers\.9\.weight"):
        import_weights(tmp_path / "more.pt", "mobilefacenet", output)
    torch.save({"a": Attack()}, tmp_path / "attack.pt")
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([1], tmp_path / "list.pt")
    for name in ("attack.pt", "text.pt", "list.pt"):
        with pytest.raises(ConfigError, match=name):
            import_weights(tmp_path / name, "mobilefacenet", output)
    assert not (tmp_path / "attacked").exists()
    path, _ = small(tmp_path, 12, ranks=3)
    (tmp_path / "checkpoint_gpu_1.pt").unlink()
    with pytest.raises(ConfigError, match=r"lacks the checkpoint of a rank: .*\[0, 2\]"):
        import_weights(path, "mobilefacenet", output)
    assert not output.exists()
