"""Logs of a run: a CSV with one line per step, TensorBoard, progress."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from training.config import ConfigError, RunConfig
from training.optimization.run_folder import ANGLES, LOSSES, VALIDATION
from training.progress import RunProgress

TENSORBOARD_INTERVAL_STEPS = 10
Measured = float | tuple[float, float, float]
"""Figure of a validation set, or the figure with the bounds of its 95 % interval."""
ANGLE_BINS = 36
"""Bins of five degrees."""
ANGLE_COLUMNS = tuple(f"{kind}_{5 * i}" for kind in ("target", "other") for i in range(ANGLE_BINS))
"""Columns of angles.csv: counts of the angles from this many degrees on."""


def truncate_log(path: Path, step: int, header: Sequence[str]) -> None:
    """Keep the lines up to ``step`` of a CSV whose first column is the step; drop incomplete lines."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        kept = [row for row in rows if len(row) == len(header) and row[0].isdigit() and int(row[0]) <= step]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *kept])
    partial.replace(path)


class RunTable:
    """CSV of a run, whose first column is the step.

    Rows of steps after ``step``, the resumed one, are removed before the first row is added, so that none is there
    twice.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step, self._is_begun = path, step, False

    def add(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        if not self._is_begun:
            truncate_log(self._path, self._step, header)
            self._is_begun = True
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)


class WandbLog:
    """Mirror of TensorBoard's figures in a project of Weights & Biases. A resumed run continues its curves.

    Raises ConfigError: the package wandb is not installed.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ConfigError("loop.wandb needs the package wandb. Install it, or leave loop.wandb empty") from error
        identity = hashlib.blake2b(str(config.output.resolve()).encode(), digest_size=8).hexdigest()
        self._run: Any = wandb.init(
            project=config.loop.wandb,
            name=config.output.name,
            id=identity,
            resume="allow",
            dir=str(config.output),
            config=config.shareable(),
        )

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


class RunLog:
    """CSV, TensorBoard and progress of the first rank.

    Args:
        batch_size: images per step, over all ranks.
        silent: log nothing, for the other ranks.
        epoch_steps: steps of an epoch.
        mirror: where TensorBoard's figures are logged, too.
    """

    def __init__(
        self,
        output: Path,
        step: int,
        total_steps: int,
        batch_size: int,
        silent: bool,
        epoch_steps: int,
        mirror: WandbLog | None = None,
    ) -> None:
        self._silent = silent
        self._losses, self._angles, self._figures = (RunTable(output / n, step) for n in (LOSSES, ANGLES, VALIDATION))
        self._events: list[SummaryWriter | WandbLog] = []
        if not silent:
            self._events.append(SummaryWriter(str(output / "tensorboard"), purge_step=step + 1))
        if mirror is not None:
            self._events.append(mirror)
        self._progress = RunProgress(step, total_steps, epoch_steps, batch_size, silent)

    def close(self) -> None:
        self._progress.close()
        for events in self._events:
            events.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step. ``values`` have the same keys at every step and include ``loss``."""
        if self._silent:
            return
        self._losses.add(["step", *values], [[step, *map(repr, values.values())]])
        if step % TENSORBOARD_INTERVAL_STEPS == 0:
            self._add_scalars(step, values)
        self._progress.update(step, values)

    def add_angles(self, step: int, counts: Sequence[Sequence[float]]) -> None:
        """Log the histograms of a step to angles.csv: (2, ANGLE_BINS) counts of angles to the own class and others."""
        if self._silent:
            return
        self._angles.add(("step", *ANGLE_COLUMNS), [[step, *(round(count) for row in counts for count in row)]])

    def log_validation(self, step: int, values: Mapping[str, Measured]) -> None:
        """Log figures of validation sets to validation.csv and TensorBoard."""
        if self._silent or not values:
            return
        full = {name: (value, "", "") if isinstance(value, float) else value for name, value in values.items()}
        header = ("step", "measure", "value", "low", "high")
        self._figures.add(header, [[step, name, *row] for name, row in full.items()])
        tqdm.write(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, (value, *_) in full.items()))
        self._add_scalars(step, {name: value for name, (value, *_) in full.items()})

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for events in self._events:
            for name, value in values.items():
                events.add_scalar(name, value, step)
