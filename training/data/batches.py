"""Batches of a run in step order, prepared ahead of their use. A batch depends only on the seed and its number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.config import RunConfig
from training.data.augment import draw_uniforms
from training.data.identities import IdentitySet
from training.data.sampling import BatchSampler

MAX_BATCHES_AHEAD = 2


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's part of the batch of one step.

    Attributes:
        number: identifies the images; equal for steps that show the same batch again.
        rows: (b,) rows of the set.
        crops: (b, s, s, 3) uint8.
        labels: (b,) classes.
        uniforms: (b, K) random numbers of the augmentation, on the CPU.
    """

    step: int
    number: int
    rows: NDArray[np.int64]
    crops: Tensor
    labels: Tensor
    uniforms: Tensor


class Batches:
    """Batches of a run on ``device``.

    Args:
        part: this rank's rows of the global batch.
    """

    def __init__(self, data: IdentitySet, config: RunConfig, part: slice, device: torch.device) -> None:
        loop = config.loop
        self._data, self._config, self._part, self._device = data, config, part, device
        self._sampler = BatchSampler(
            data.labels, loop.batch_size, loop.seed, config.data.images_per_person, data.repeats
        )
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self.total_steps = self.steps_per_epoch * loop.epochs
        self._resident = None if device.type == "cpu" else _copy_if_it_fits(data.crops_NHWC, device)

    def iterate(self, first: int) -> Iterator[Batch]:
        """Yield the batches from step ``first`` to the last one."""
        # One thread keeps the order of the sampler's epochs.
        with ThreadPoolExecutor(1) as pool:
            pending: deque[Future[Batch]] = deque()
            try:
                for step in range(first, self.total_steps):
                    pending.append(pool.submit(self._prepare, step))
                    if len(pending) > MAX_BATCHES_AHEAD:
                        yield self._move(pending.popleft().result())
                while pending:
                    yield self._move(pending.popleft().result())
            finally:
                for waiting in pending:
                    waiting.cancel()

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return this rank's rows of a step."""
        epoch, position = divmod(self._number(step), self.steps_per_epoch)
        return self._sampler.rows(epoch, position)[self._part]

    def _number(self, step: int) -> int:
        views = self._config.distill.views
        return step % (self.steps_per_epoch * views) if views else step

    def _prepare(self, step: int) -> Batch:
        loop, number, rows = self._config.loop, self._number(step), self.rows(step)
        uniforms = draw_uniforms(loop.batch_size, loop.seed, number)[self._part]
        crops = torch.from_numpy(np.zeros(0, np.uint8) if self._resident is not None else self._data.crops_NHWC[rows])
        labels = torch.from_numpy(self._data.labels[rows])
        if self._device.type == "cuda":
            crops, labels = crops.pin_memory(), labels.pin_memory()
        return Batch(step, number, rows, crops, labels, uniforms)

    def _move(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        crops, labels = (tensor.to(self._device, non_blocking=True) for tensor in (batch.crops, batch.labels))
        if self._resident is not None:
            crops = self._resident[torch.from_numpy(batch.rows).to(self._device, non_blocking=True)]
        return Batch(batch.step, batch.number, batch.rows, crops, labels, batch.uniforms)


def _copy_if_it_fits(crops_NHWC: NDArray[np.uint8], device: torch.device) -> Tensor | None:
    """Copy the set to GPU memory if it needs less than half of the free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    return copy_to_device(device, crops_NHWC) if crops_NHWC.nbytes < free / 2 else None


def copy_to_device(device: torch.device, crops_NHWC: NDArray[np.uint8], block: int = 4096) -> Tensor:
    """Copy a memory map in pieces, since it may exceed host memory."""
    copy = torch.empty(crops_NHWC.shape, dtype=torch.uint8, device=device)
    for start in range(0, len(crops_NHWC), block):
        copy[start : start + block] = torch.from_numpy(np.array(crops_NHWC[start : start + block]))
    return copy
