"""Less memory for more time: blocks that forget their activations and compute them again in the backward pass.

T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputable(nn.Module, ABC):
    """A block that says what it computes in :meth:`compute`, and can do so a second time rather than remember."""

    recomputed = False

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        if not (self.recomputed and self.training and torch.is_grad_enabled()):
            return self.compute(x)
        out: Tensor
        if torch.compiler.is_compiling():
            # A compiled graph updates the statistics once whatever it recomputes, and takes no contexts of ours.
            out = checkpoint(self.compute, x, use_reentrant=False)
        else:
            out = checkpoint(
                self.compute, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _statistics_kept(self))
            )
        return out


def checkpoint_blocks(backbone: nn.Module) -> None:
    """Make every block of ``backbone`` recompute its activations; results, statistics and state stay the same."""
    for module in backbone.modules():
        if isinstance(module, Recomputable):
            module.recomputed = True


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Lend ``block`` copies of its buffers: the first pass has counted the batch, the second must not count it again.

    Copies rather than none, for autograd saves running statistics and both passes must save the same.
    """
    kept = [(m, name, buffer) for m in block.modules() for name, buffer in m.named_buffers(recurse=False)]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
