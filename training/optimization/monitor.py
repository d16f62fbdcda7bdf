"""Values of the steps of a run: read together, checked, and logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from training import distributed
from training.errors import NON_FINITE_REMEDY, NonFiniteLossError
from training.losses.core import Head, upcast
from training.optimization.health import RunHealth
from training.optimization.logs import ANGLE_BINS, RunLog

GPU_INTERVAL_STEPS = 20
"""Steps between two reads on a GPU: each read waits for the device."""
WINDOW_SHARE, MAX_WINDOW_STEPS = 0.02, 50
"""Share of a run over which angles are counted, at its start, middle and end."""
AngleWindow = Literal["start", "middle", "end"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Values of one step: scalars on the device, which differ by rank, and numbers known without reading.

    ``angles``: histograms of the angles of this rank, in the steps whose `angle_window` is not None.
    """

    step: int
    measured: Mapping[str, Tensor]
    known: Mapping[str, float]
    angles: Tensor | None = None


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
            if result.angles is not None:
                logs.add_angles(result.step, result.angles.tolist())
            if distributed.rank() == 0:
                for warning in self._health.check(result.step, values):
                    log.warning(warning)
        self._results, self._values = [], []


@torch.no_grad()
def measure_embeddings(head: Head, embeddings_BD: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
    """Return the mean length of embeddings, their spread 1 - ||mean direction||, the mean angles to the weights of the
    own class and of others, and the accuracy of the head's last batch. Heads without classes have only the first two.
    """
    x_BD = upcast(embeddings_BD)
    own, angles = head.target_angle_deg(x_BD, labels_B), head.angles_deg(x_BD, labels_B)
    return {
        "embedding_norm": x_BD.norm(dim=1).mean(),
        "embedding_spread": 1 - F.normalize(x_BD).mean(0).norm(),
        **({} if own is None else {"target_angle_deg": own}),
        **({} if angles is None else {"other_angle_deg": angles[1].nanmean()}),
        **({} if head.accuracy is None else {"accuracy": head.accuracy}),
    }


def angle_window(step: int, total_steps: int) -> AngleWindow | None:
    """Return the window in which a step, from 1 to ``total_steps``, lies. Each has WINDOW_SHARE of the steps."""
    size = min(MAX_WINDOW_STEPS, max(1, round(WINDOW_SHARE * total_steps)))
    if step <= size:
        return "start"
    if step > total_steps - size:
        return "end"
    return "middle" if 0 <= step - (total_steps - size) // 2 - 1 < size else None


@torch.no_grad()
def count_angles(head: Head, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor | None:
    """Return (2, ANGLE_BINS) counts of the angles to the own class and to others, in bins from 0 to 180 degrees. None
    for a head without class weights."""
    angles = head.angles_deg(embeddings_BD, labels_B)
    return None if angles is None else torch.stack([torch.histc(part, ANGLE_BINS, 0, 180) for part in angles])
