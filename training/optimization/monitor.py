"""Values of the steps of a run: read together, checked, and logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training import distributed
from training.errors import NON_FINITE_REMEDY, NonFiniteLossError
from training.losses import Head
from training.losses.core import upcast
from training.optimization.health import RunHealth
from training.optimization.logs import RunLog

GPU_INTERVAL_STEPS = 20
"""Steps between two reads on a GPU: each read waits for the device."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Values of one step: scalars on the device, which differ by rank, and numbers known without reading."""

    step: int
    measured: Mapping[str, Tensor]
    known: Mapping[str, float]


class Monitor:
    """Buffer of step results. On a CPU every step is read, since reading costs nothing there. ``scaled``: a loss scaler
    skips the steps whose gradients overflow, so that these need not be finite."""

    def __init__(self, health: RunHealth, device: torch.device, scaled: bool = False) -> None:
        self._health, self._scaled = health, scaled
        self._interval = 1 if device.type == "cpu" else GPU_INTERVAL_STEPS
        self._results: list[StepResult] = []
        self._values: list[Tensor] = []
        self.loss = math.nan
        """Loss of the last step that was read."""

    @property
    def due(self) -> bool:
        """True if enough steps are buffered. Equal on all ranks."""
        return len(self._results) >= self._interval

    def add(self, result: StepResult) -> None:
        self._results.append(result)
        self._values.append(torch.stack([value.double() for value in result.measured.values()]))

    def flush(self, logs: RunLog) -> None:
        """Read, check and log the buffered steps: means over ranks. Collective: every rank must call it. Raises
        NonFiniteLossError if a value of a step, such as its loss or gradient, is NaN or infinite."""
        if not self._results:
            return
        means = distributed.all_reduce_sum(torch.stack(self._values)) / distributed.world_size()
        for result, row in zip(self._results, means.tolist(), strict=True):
            values = {**dict(zip(result.measured, row, strict=True)), **result.known}
            for name, value in values.items():
                checked = not (self._scaled and name.startswith(("gradient_", "clip_")))
                if checked and not math.isfinite(value):
                    raise NonFiniteLossError(f"{name} is not finite at step {result.step}. {NON_FINITE_REMEDY}")
            self.loss = values["loss"]
            logs.add(result.step, values)
            if distributed.rank() == 0:
                for warning in self._health.check(result.step, values):
                    log.warning(warning)
        self._results, self._values = [], []


@torch.no_grad()
def measure_embeddings(head: Head, embeddings_BD: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
    """Return the mean length of embeddings, their spread 1 - ||mean direction||, the mean target angle, and the
    accuracy of the head's last batch. Heads without classes have neither angle nor accuracy."""
    x_BD = upcast(embeddings_BD)
    angles = head.target_angle_deg(x_BD, labels_B)
    return {
        "embedding_norm": x_BD.norm(dim=1).mean(),
        "embedding_spread": 1 - F.normalize(x_BD).mean(0).norm(),
        **({} if angles is None else {"target_angle_deg": angles}),
        **({} if head.accuracy is None else {"accuracy": head.accuracy}),
    }
