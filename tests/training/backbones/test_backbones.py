"""Backbones match their papers, train, reload and export; checkpointed blocks give equal results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from training.backbones import build_backbone
from training.backbones.checkpointing import checkpoint_blocks
from training.backbones.drop_path import DropPath, drop_shares
from training.backbones.iresnet import DEPTHS, IResNet, ThinIResNet
from training.backbones.mobilefacenet import MobileFaceNet
from training.backbones.vit import VisionTransformer
from training.config import BackboneConfig, BackboneName

SIDE = 32
SMALL: dict[str, Callable[[], nn.Module]] = {
    "thin_iresnet": lambda: ThinIResNet(32, (16, 16, 16), (1, 1, 1), crop_px=SIDE),
    "iresnet": lambda: IResNet((1, 1, 1, 1), 32, dropout=0.4, crop_px=SIDE),
    "mobilefacenet": lambda: MobileFaceNet(32, SIDE),
    "vit": lambda: VisionTransformer(2, 32, drop_path=0.5, width=32, heads=4, crop_px=SIDE),
}
"""Networks with few blocks of each kind."""


def crops(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def trained(backbone: nn.Module, steps: int) -> list[float]:
    """Return the losses of some steps of SGD."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        embeddings = backbone(crops(2, seed=step))
        loss = (embeddings - torch.linspace(-1, 1, embeddings.shape[1])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, 112) for name in get_args(BackboneName)),
        *((name, side) for name in ("thin_iresnet", "iresnet18", "mobilefacenet", "vit_s") for side in (96, 144)),
    ],
)
def test_every_parameter_of_every_network_gets_a_gradient(name: BackboneName, side: int) -> None:
    with torch.device("meta"):
        backbone = build_backbone(BackboneConfig(name, embedding_dim=32), side)
        with torch.set_grad_enabled(side == 112):
            embeddings = backbone(torch.zeros(2, 3, side, side))
        assert embeddings.shape == (2, 32)
        if side == 112:
            embeddings.square().sum().backward()
            missing = [key for key, p in backbone.named_parameters() if p.requires_grad and p.grad is None]
            assert missing == []


def test_checkpoints_of_thin_networks_stay_readable() -> None:
    """State-dict keys equal those of saved runs and packs."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    block = [*(f"body.0.{n}" for n in norm), "body.1.weight", *(f"body.2.{n}" for n in norm), "body.3.weight"]
    block += ["body.4.weight", *(f"body.5.{n}" for n in norm)]
    shortcut = ["shortcut.0.weight", *(f"shortcut.1.{n}" for n in norm)]
    names = ["stem.0.weight", *(f"stem.1.{n}" for n in norm), "stem.2.weight"]
    for index, first in enumerate((True, True, False, True, False)):
        names += [f"body.{index}.{n}" for n in (block + shortcut if first else block)]
    names += ["head.0.weight", *(f"head.1.{n}" for n in norm), "head.3.weight", *(f"head.4.{n}" for n in norm)]
    assert list(ThinIResNet().state_dict()) == names


@pytest.mark.parametrize(
    ("name", "published_millions"),
    [("iresnet18", 24.03), ("iresnet34", 34.14), ("iresnet50", 43.59), ("iresnet100", 65.16)],
)
def test_iresnets_have_their_published_sizes(name: str, published_millions: float) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in IResNet(DEPTHS[name]).parameters())
    assert round(count / 1e6, 2) == published_millions


@pytest.mark.parametrize(
    ("name", "dimension", "published", "rel"),
    [
        ("mobilefacenet", 128, 221e6, 3e-3),  # section 4.2
        # Open Model Zoo, face-recognition-resnet100-arcface-onnx: 24.2115 GFLOPs, two to a multiply-add.
        ("iresnet100", 512, 24.2115e9 / 2, 2e-3),
        # InsightFace's ViT-S and ViT-B: its GFLOPs are multiply-adds.
        ("vit_s", 512, 5.7e9, 0.06),
        ("vit_b", 512, 11.4e9, 0.06),
    ],
)
def test_networks_cost_what_is_published(name: BackboneName, dimension: int, published: float, rel: float) -> None:
    with torch.device("meta"):
        network = build_backbone(BackboneConfig(name, embedding_dim=dimension))
        with FlopCounterMode(display=False) as counter:
            network.eval()(torch.empty(1, 3, 112, 112))
    assert counter.get_total_flops() / 2 == pytest.approx(published, rel=rel)


def test_strides_match_the_papers() -> None:
    """ArcFace's blocks stride in the second convolution, thin ones in the first."""

    def strides(backbone: IResNet | ThinIResNet) -> list[tuple[int, ...]]:
        block = next(backbone.body.children())
        return [m.stride for m in block.modules() if isinstance(m, nn.Conv2d)]

    with torch.device("meta"):
        assert strides(IResNet(DEPTHS["iresnet18"])) == [(1, 1), (2, 2), (2, 2)]
        assert strides(ThinIResNet()) == [(2, 2), (1, 1), (2, 2)]


def saved_bytes(backbone: nn.Module) -> int:
    """Return the memory of what a forward pass saves for the backward pass."""
    own = {p.data_ptr() for p in backbone.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = backbone(crops(2))
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("name", SMALL)
def test_checkpointed_blocks_train_equally_with_less_memory(name: str) -> None:
    plain = SMALL[name]()
    recomputing = copy.deepcopy(plain)
    checkpoint_blocks(recomputing)
    # The loop copies networks for averaging: a copy must recompute its own weights.
    recomputing = copy.deepcopy(recomputing)
    assert saved_bytes(recomputing) < 0.6 * saved_bytes(plain)
    assert trained(recomputing, steps=2) == trained(plain, steps=2)
    for (key, expected), actual in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        if expected.grad is not None:
            assert torch.isfinite(expected.grad).all(), key
            assert actual.grad is not None, key
            assert torch.equal(actual.grad, expected.grad), key
    assert list(recomputing.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(recomputing.state_dict()[key], value), key


def test_an_iresnet_has_dropout_in_training_and_dimensions_of_equal_share() -> None:
    backbone = SMALL["iresnet"]()
    trained(backbone, steps=2)
    state = backbone.state_dict()
    assert torch.equal(state["head.4.weight"], torch.ones(32))
    assert not torch.equal(state["head.4.bias"], torch.zeros(32))
    with torch.no_grad():
        assert not torch.equal(backbone(crops(2)), backbone(crops(2)))
        backbone.eval()
        assert torch.equal(backbone(crops(2)), backbone(crops(2)))


def test_checkpointed_blocks_train_equally_when_compiled() -> None:
    plain = SMALL["thin_iresnet"]()
    recomputing = copy.deepcopy(plain)
    checkpoint_blocks(recomputing)
    recomputing.compile(backend="aot_eager")
    assert trained(recomputing, steps=2) == pytest.approx(trained(plain, steps=2), rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(recomputing.state_dict()[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_a_vit_trains_and_drops_whole_branches() -> None:
    torch.manual_seed(0)
    network = VisionTransformer(2, 8, drop_path=0.5, width=32, heads=4)
    images = torch.randn(4, 3, 112, 112)
    network.eval()
    assert torch.equal(network(images), network(images))
    drop = DropPath(0.25)
    kept = drop(torch.ones(4000, 1, 2))
    assert sorted(set(kept.flatten().tolist())) == pytest.approx([0.0, 4 / 3])
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)
    assert drop_shares(3, 0.2) == pytest.approx([0.0, 0.1, 0.2])
