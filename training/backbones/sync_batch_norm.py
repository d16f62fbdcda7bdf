"""Batch normalization over the global batch, on CPUs too, where torch's implementation does not run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from training import distributed


def synchronize_batch_norm(backbone: nn.Module) -> nn.Module:
    """Replace the batch norms of ``backbone`` in place by ones over the global batch, and return it.

    Parameters, buffers and state-dict keys stay the same. Ranks may hold batches of unequal size. Evaluation and a
    single process are unaffected.
    """
    if next(backbone.parameters()).is_cuda:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)  # type: ignore[no-untyped-call]
        return converted
    for module in list(backbone.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(module, name, GlobalBatchNorm.from_batch_norm(child))
    return backbone


class GlobalBatchNorm(_BatchNorm):
    """Batch norm whose mini-batch is that of all ranks: (B, C) or (B, C, H, W) to the same shape and dtype. S. Ioffe
    and C. Szegedy, "Batch Normalization", 2015, algorithm 1. Statistics are computed in at least fp32."""

    @classmethod
    def from_batch_norm(cls, plain: _BatchNorm) -> GlobalBatchNorm:
        module = cls(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        # Share parameters and buffers: an optimizer may already hold them.
        module.__dict__.update(plain.__dict__)
        return module

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and distributed.world_size() > 1):
            return super().forward(x)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        others = [d for d in range(x.ndim) if d != 1]
        per_channel = (1, -1) + (1,) * (x.ndim - 2)
        # Two passes: mean(x^2) - mean(x)^2 loses precision where the mean is large.
        sums = _sum_over_ranks(torch.cat([exact.sum(others), exact.new_tensor([x.numel() / x.shape[1]])]))
        count = sums[-1].detach()
        mean_C = sums[:-1] / count
        centered = exact - mean_C.view(per_channel)
        variance_C = _sum_over_ranks(centered.square().sum(others)) / count
        self._track(mean_C.detach(), variance_C.detach() * count / (count - 1))
        out = centered * torch.rsqrt(variance_C + self.eps).view(per_channel)
        if self.affine:
            out = out * self.weight.view(per_channel) + self.bias.view(per_channel)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean_C: Tensor, unbiased_variance_C: Tensor) -> None:
        if self.track_running_stats:
            seen = self.get_buffer("num_batches_tracked").add_(1)
            # In torch, None means the plain average of all batches.
            share = 1 / float(seen) if self.momentum is None else self.momentum
            for name, value_C in (("running_mean", mean_C), ("running_var", unbiased_variance_C)):
                buffer_C = self.get_buffer(name)
                buffer_C.lerp_(value_C.to(buffer_C.dtype), share)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.ndim < 2:
            raise ValueError(f"batch norm needs (B, C) or (B, C, H, W), not {tuple(input.shape)}")


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose gradient is also summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return distributed.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return distributed.all_reduce_sum(gradients[0])


def _sum_over_ranks(x: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x)  # type: ignore[no-untyped-call]
    return total
