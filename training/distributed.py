"""Helpers for distributed training. With one process, all functions are the identity."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

TIMEOUT: Final = timedelta(hours=6)
"""Time for which ranks wait for each other: the first one decodes data, and disks may be slow."""


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device() -> torch.device:
    """Return this rank's GPU, or the CPU."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device, without waiting for the device."""
    # From pageable memory, the host would wait for the copy, and so for all work queued before it.
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group when started by torchrun; otherwise do nothing."""
    if configured_world_size() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    try:
        yield
        dist.barrier()
    finally:
        # DistributedDataParallel is in a reference cycle and keeps the group alive; gloo's threads abort a process that
        # exits before they end.
        gc.collect()
        dist.destroy_process_group()


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def new_cpu_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for exchanges of a thread, or None for one process. Collective."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size() > 1 else None


def broadcast_first(values: Tensor) -> Tensor:
    """Return the first rank's ``values``, of equal shape on all ranks, without gradient."""
    first = values.detach().clone()
    if world_size() > 1:
        dist.broadcast(first, 0)
    return first


def broadcast_buffers(network: nn.Module) -> None:
    """Set the buffers of a network, such as the statistics of batch norms, to those of the first rank."""
    if world_size() > 1:
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)


def any_rank(decision: bool) -> bool:
    """Return whether ``decision`` is true on any rank."""
    if world_size() == 1:
        return decision
    return bool(all_reduce_sum(torch.tensor(int(decision), device=device())))


def configured_world_size() -> int:
    """Return the world size set by torchrun, before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def split_evenly(count: int, rank_index: int, world: int) -> slice:
    """Return the contiguous part of ``count`` items of a rank. Parts differ by at most one item."""
    base, rest = divmod(count, world)
    start = rank_index * base + min(rank_index, rest)
    return slice(start, start + base + (rank_index < rest))


@torch.no_grad()
def all_gather(values: Tensor) -> Tensor:
    """Concatenate the (n, ...) rows of all ranks, in rank order, without gradient. All ranks hold equally many."""
    if world_size() == 1:
        return values.detach()
    gathered = values.new_empty(world_size() * len(values), *values.shape[1:])
    dist.all_gather_single(gathered, values.detach().contiguous())
    return gathered


def all_gather_parts(part: Tensor, count: int) -> Tensor:
    """Concatenate the parts into which `split_evenly` split ``count`` rows, without gradient."""
    padded = part.new_zeros(-(-count // world_size()), *part.shape[1:])
    padded[: len(part)] = part
    slices = [split_evenly(count, each, world_size()) for each in range(world_size())]
    gathered = all_gather(padded).view(world_size(), *padded.shape)
    return torch.cat([rows[: own.stop - own.start] for rows, own in zip(gathered, slices, strict=True)])


class _AllGather(torch.autograd.Function):
    """All-gather of rows with gradient. ``sum_grad`` adds the gradients that all ranks found for a row."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, sum_grad: bool) -> Tensor:
        ctx.count, ctx.sum_grad = len(values), sum_grad  # type: ignore[attr-defined]
        return all_gather(values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, count = gradients[0], cast(int, ctx.count)  # type: ignore[attr-defined]
        if ctx.sum_grad:  # type: ignore[attr-defined]
            own = gradient.new_empty(count, *gradient.shape[1:])
            dist.reduce_scatter_single(own, gradient.contiguous())
        else:
            own = gradient[rank() * count : (rank() + 1) * count]
        # Gradients of replicated parameters are averaged over ranks afterwards, so the gradient of a global-batch loss
        # is multiplied by world_size here.
        return own * world_size(), None


def all_gather_own_grad(values: Tensor) -> Tensor:
    """Gather (n, ...) rows to (world * n, ...), for a loss that every rank computes in full."""
    return values if world_size() == 1 else cast(Tensor, _AllGather.apply(values, False))  # type: ignore[no-untyped-call]


def all_gather_sum_grad(values: Tensor) -> Tensor:
    """Gather (n, ...) rows to (world * n, ...), for a loss of which every rank computes a part."""
    return values if world_size() == 1 else cast(Tensor, _AllGather.apply(values, True))  # type: ignore[no-untyped-call]


class GradientMean:
    """Mean over ranks of the gradients of replicated parameters, exchanged while the backward pass goes on.

    `DistributedDataParallel` does the same for the backbone. All ranks find the gradients in the same order.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.complete = True
        """True if the next backward pass is the last of a step: its gradients are exchanged."""
        self._begun: list[tuple[dist.Work, Tensor]] = []
        if world_size() > 1:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self.complete and gradient is not None:
            work = dist.all_reduce(gradient, async_op=True)
            self._begun.append((cast(dist.Work, work), gradient))

    def wait(self) -> None:
        """Finish the exchange. On a GPU, the work queued afterwards waits for it, not the host."""
        for work, gradient in self._begun:
            work.wait()
            gradient /= world_size()
        self._begun = []


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the sum over ranks, without gradient."""
    return _all_reduce(value, dist.ReduceOp.SUM)


def all_reduce_max(value: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks, without gradient."""
    return _all_reduce(value, dist.ReduceOp.MAX)


def _all_reduce(value: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    result = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(result, how)
    return result


@cache
def has_native_bf16() -> bool:
    """Return whether the hardware multiplies bfloat16 (CUDA, AMX or AVX512-BF16)."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags
