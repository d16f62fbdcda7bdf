"""Batches of a run in step order, prepared ahead of their use. A batch depends only on the seed and its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.config import RunConfig
from training.data.augment import draw_uniforms
from training.data.identities import IdentitySet, map_in_threads
from training.data.sampling import BatchSampler
from training.distributed import to_device

MAX_AHEAD = 2
"""Batches that a thread prepares ahead of their use."""


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's part of the batch of one step.

    Attributes:
        rows: (b,) rows of the set.
        crops: (b, s, s, 3) uint8.
        labels: (b,) classes.
        uniforms: (b, K) random numbers of the augmentation, on the CPU.
    """

    step: int
    rows: NDArray[np.int64]
    crops: Tensor
    labels: Tensor
    uniforms: Tensor

    def pin_memory(self) -> Batch:
        return replace(self, crops=self.crops.pin_memory(), labels=self.labels.pin_memory())


class Batches:
    """Batches of a run on ``device``: the rows ``part`` of each global batch."""

    def __init__(self, data: IdentitySet, config: RunConfig, part: slice, device: torch.device) -> None:
        loop = config.loop
        self._data, self._config, self._part, self._device = data, config, part, device
        self._sampler = BatchSampler(data.labels, loop.batch_size, loop.seed, config.data.images_per_person)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self.total_steps = self.steps_per_epoch * loop.epochs
        self._copies = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def iterate(self, first: int) -> Iterator[Batch]:
        """Yield the batches from step ``first`` to the last one. Threads prepare them."""
        threads = max(1, self._config.data.workers)
        for batch in map_in_threads(self._prepare, range(first, self.total_steps), threads, MAX_AHEAD * threads):
            yield self._move(batch)

    def _prepare(self, step: int) -> Batch:
        loop = self._config.loop
        rows = self._sampler.rows(*divmod(step, self.steps_per_epoch))[self._part]
        uniforms = draw_uniforms(loop.batch_size, loop.seed, step)[self._part]
        crops, labels = self._data.crops_NHWC[rows], self._data.labels[rows]
        batch = Batch(step, rows, torch.from_numpy(crops), torch.from_numpy(labels), uniforms)
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def _move(self, batch: Batch) -> Batch:
        """Copy to a GPU on a stream of its own, while the steps before are computed."""
        if self._copies is None:
            return batch
        with torch.cuda.stream(self._copies):
            crops, labels = (to_device(tensor, self._device) for tensor in (batch.crops, batch.labels))
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        for tensor in (crops, labels):
            tensor.record_stream(computing)  # its memory is used again only after the step
        return replace(batch, crops=crops, labels=labels)
