"""Gradient checkpointing: blocks recompute their activations in the backward pass to save memory.

T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CheckpointedBlock(nn.Module, ABC):
    """Block that implements `compute` and can recompute it in the backward pass."""

    checkpointed = False

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        if not (self.checkpointed and self.training and torch.is_grad_enabled()):
            return self.compute(x)
        out: Tensor
        if torch.compiler.is_compiling():
            # A compiled graph updates statistics only once, and does not accept context functions.
            out = checkpoint(self.compute, x, use_reentrant=False)
        else:
            out = checkpoint(
                self.compute, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _buffers_restored(self))
            )
        return out


def checkpoint_blocks(backbone: nn.Module) -> None:
    """Enable checkpointing in every block of ``backbone``. Results, statistics and state stay the same."""
    for module in backbone.modules():
        if isinstance(module, CheckpointedBlock):
            module.checkpointed = True


@contextmanager
def _buffers_restored(block: nn.Module) -> Iterator[None]:
    """Give ``block`` copies of its buffers during recomputation, so that batch statistics are not updated twice.
    Autograd saves running statistics, and both passes must save the same tensors: hence copies."""
    saved = [(m, name, buffer) for m in block.modules() for name, buffer in m.named_buffers(recurse=False)]
    for module, name, buffer in saved:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in saved:
            setattr(module, name, buffer)
