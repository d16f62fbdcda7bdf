"""Two ranks with half of the batch each equal one process with the whole batch."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.backbones import ThinIResNet, checkpoint_blocks, synchronize_batch_norm

pytestmark = pytest.mark.long

ROWS = (slice(0, 3), slice(3, 8))
"""Unequal sizes, which a plain average over ranks would get wrong."""
TIMEOUT = timedelta(seconds=60)


def network() -> nn.Module:
    """Return a network in double precision, so that differences are bugs."""
    torch.manual_seed(0)
    return ThinIResNet(16, widths=(8, 8, 16), depths=(1, 1, 1), stem=8).double()


def batch() -> tuple[Tensor, Tensor]:
    """Return (8, 3, 112, 112) images far from zero mean, and (8, 16) output weights."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 112, 112, generator=generator, dtype=torch.double) + torch.arange(8).view(-1, 1, 1, 1)
    return images, torch.randn(8, 16, generator=generator, dtype=torch.double)


def outcome(backbone: nn.Module, rows: slice) -> dict[str, Tensor]:
    """Return outputs, gradients and state after two steps on some rows; the loss is the mean over the whole batch."""
    images, weights = batch()
    part = images[rows].requires_grad_()
    for _ in range(2):
        out = backbone(part)
        ((out + out.square()) * weights[rows]).sum().div(len(images)).backward()
    assert part.grad is not None
    gradients = {f"gradient {name}": p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    evaluated = backbone.eval()(images).detach()
    return {"out": out.detach(), "input gradient": part.grad, "evaluated": evaluated, **gradients} | {
        f"state {name}": value for name, value in backbone.state_dict().items()
    }


def one_rank(rank: int, folder: Path, checkpointed: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", TIMEOUT, len(ROWS), rank)
    backbone = synchronize_batch_norm(network())
    if checkpointed:
        checkpoint_blocks(backbone)
    torch.save(outcome(backbone, ROWS[rank]), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["remembered", "recomputed"])
def test_two_ranks_equal_one_process(tmp_path: Path, checkpointed: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=one_rank, args=(rank, tmp_path, checkpointed)) for rank in range(len(ROWS))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT.total_seconds())
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0], "a rank failed, or hangs (None)"
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(len(ROWS))]
    whole = outcome(network(), slice(None))
    assert list(parts[0]) == list(whole)
    for name, expected in whole.items():
        shares = [part[name] for part in parts]
        if name in ("out", "input gradient"):
            torch.testing.assert_close(torch.cat(shares), expected, rtol=1e-8, atol=1e-10, msg=name)
        elif name.startswith("gradient"):
            torch.testing.assert_close(sum(shares), expected, rtol=1e-8, atol=1e-10, msg=name)
        else:
            for share in shares:
                torch.testing.assert_close(share, expected, rtol=1e-8, atol=1e-10, msg=name)


def test_one_process_is_unchanged() -> None:
    plain, synchronized = outcome(network(), slice(None)), outcome(synchronize_batch_norm(network()), slice(None))
    assert list(synchronized) == list(plain)
    assert all(torch.equal(synchronized[name], plain[name]) for name in plain)


def test_an_optimizer_keeps_its_parameters() -> None:
    backbone = network()
    before = list(backbone.parameters())
    after = list(synchronize_batch_norm(backbone).parameters())
    assert all(a is b for a, b in zip(after, before, strict=True))
