"""Batches of a run in step order, prepared ahead of their use. A batch depends only on the seed and its number."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.config import RunConfig
from training.data.augment import draw_uniforms
from training.data.identities import IdentitySet, map_in_threads
from training.data.sampling import BatchSampler
from training.distributed import to_device

MAX_BATCHES_AHEAD = 2


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


class Batches(Dataset[Batch]):
    """Batches of a run on ``device``: the rows ``part`` of each global batch. As a data set, they are decoded in worker
    processes by step and rows."""

    def __init__(self, data: IdentitySet, config: RunConfig, part: slice, device: torch.device) -> None:
        loop = config.loop
        self._data, self._config, self._part, self._device = data, config, part, device
        self._sampler = BatchSampler(data.labels, loop.batch_size, loop.seed, config.data.images_per_person)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self.total_steps = self.steps_per_epoch * loop.epochs
        self._copies = None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def iterate(self, first: int) -> Iterator[Batch]:
        """Yield the batches from step ``first`` to the last one."""
        if self._config.data.workers:
            ahead = self._decode(first)
        else:  # one thread keeps the order of the sampler's epochs
            ahead = map_in_threads(self._pinned, range(first, self.total_steps), 1, MAX_BATCHES_AHEAD)
        for batch in ahead:
            yield self._move(batch)

    def _decode(self, first: int) -> Iterator[Batch]:
        """Yield batches of worker processes, in order. Only the rows of a batch are sent to them."""
        # Workers use one core. A worker that ends the thread pool itself would wait for threads that it does not have.
        cv2.setNumThreads(1)
        return iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=((step, self.rows(step)) for step in range(first, self.total_steps)),
                num_workers=self._config.data.workers,
                prefetch_factor=MAX_BATCHES_AHEAD,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=_start_worker,
                # Forked workers share the list of images.
                multiprocessing_context=multiprocessing.get_context("fork"),
            )
        )

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return this rank's rows of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._sampler.rows(epoch, position)[self._part]

    def __getitem__(self, job: tuple[int, NDArray[np.int64]]) -> Batch:
        """Return the batch of a step and its rows, on the CPU."""
        step, rows = job
        loop = self._config.loop
        uniforms = draw_uniforms(loop.batch_size, loop.seed, step)[self._part]
        crops, labels = self._data.crops_NHWC[rows], self._data.labels[rows]
        return Batch(step, rows, torch.from_numpy(crops), torch.from_numpy(labels), uniforms)

    def _pinned(self, step: int) -> Batch:
        batch = self[step, self.rows(step)]
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


def _start_worker(_number: int) -> None:
    """Leave Ctrl-C to the main process, which stops after its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
