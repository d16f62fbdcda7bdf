"""Ranks: who am I, and what do the others have. With one process everything here is the identity."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device() -> torch.device:
    """This rank's accelerator, or the processor."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


@contextmanager
def session() -> Iterator[None]:
    """Join the other ranks when started by torchrun; otherwise nothing."""
    if world_size_to_be() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    # The first rank decodes the data, and judges, while the others wait.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=6))
    try:
        yield
        dist.barrier()
    finally:
        # DistributedDataParallel lies in a reference cycle and holds the group; gloo's threads abort a process that
        # ends while they live.
        gc.collect()
        dist.destroy_process_group()


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def agree(wish: bool) -> bool:
    """Whether the first rank wishes so: clocks differ, and all ranks must do the same."""
    if world_size() == 1:
        return wish
    first = torch.tensor(int(wish), device=device())
    dist.broadcast(first, 0)
    return bool(first)


def world_size_to_be() -> int:
    """Of the session that torchrun has prepared, before it is joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share(count: int, of_rank: int, world: int) -> slice:
    """The contiguous part of ``count`` items that belongs to a rank; parts differ by one item at most."""
    base, rest = divmod(count, world)
    start = of_rank * base + min(of_rank, rest)
    return slice(start, start + base + (of_rank < rest))


@torch.no_grad()
def gathered(values: Tensor) -> Tensor:
    """Every rank's (n_r, ...) rows, in the order of ranks; no gradient passes."""
    if world_size() == 1:
        return values.detach()
    counts = [torch.zeros(1, dtype=torch.long, device=values.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(values)], device=values.device))
    longest = max(int(c) for c in counts)
    padded = values.new_zeros(longest, *values.shape[1:])
    padded[: len(values)] = values.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


class _GatherRows(torch.autograd.Function):
    """Every rank's rows with gradient. Each rank computes the loss of the whole batch, so that a row's gradient is the
    sum of what the ranks found for it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor) -> Tensor:
        ctx.count = len(values)  # type: ignore[attr-defined]
        return gathered(values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        total = gradient.clone()
        dist.all_reduce(total)
        count: int = ctx.count  # type: ignore[attr-defined]
        # All ranks hold equally many rows (the loop sees to it). Gradients of replicated parameters are averaged over
        # ranks afterwards; a loss of the whole batch must therefore weigh world_size times as much.
        return total[rank() * count : (rank() + 1) * count] * world_size()


class _AllRows(torch.autograd.Function):
    """Every rank's rows, for a loss that every rank computes in full: each already knows its own rows' gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor) -> Tensor:
        ctx.count = len(values)  # type: ignore[attr-defined]
        return gathered(values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        count: int = ctx.count  # type: ignore[attr-defined]
        # Averaging over ranks follows, as above.
        return gradients[0][rank() * count : (rank() + 1) * count] * world_size()


def all_rows(values: Tensor) -> Tensor:
    """(n, ...) rows of each rank to (world * n, ...), for a loss that every rank computes in full."""
    if world_size() == 1:
        return values
    rows: Tensor = _AllRows.apply(values)  # type: ignore[no-untyped-call]
    return rows


def gathered_with_gradient(values: Tensor) -> Tensor:
    """(n, ...) rows of each rank to (world * n, ...), for a loss of which every rank computes a part."""
    if world_size() == 1:
        return values
    rows: Tensor = _GatherRows.apply(values)  # type: ignore[no-untyped-call]
    return rows


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """All-reduce the gradients of replicated parameters to their mean over ranks."""
    if world_size() == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= world_size()
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def total(value: Tensor) -> Tensor:
    """The sum over ranks; no gradient passes."""
    result = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(result)
    return result


def bf16_is_native() -> bool:
    """Whether this machine multiplies bfloat16 in hardware (CUDA, AMX or AVX512-BF16)."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags
