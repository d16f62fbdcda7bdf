"""What a run tells while it goes: a CSV with one line a step, TensorBoard, a progress bar."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from training.run_folder import LOSSES, VALIDATION

TENSORBOARD_EVERY = 10
"""Steps; the CSV has them all."""


class LossLog:
    """A CSV with one line a step, cut back to the resumed step so that a replayed step is not written twice."""

    def __init__(self, path: Path, step: int, columns: Sequence[str]) -> None:
        cut_back(path, step, ["step", *columns])
        self._stream = path.open("a", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._stream)

    def close(self) -> None:
        self._stream.close()

    def add(self, step: int, *values: float) -> None:
        self._writer.writerow([step, *map(repr, values)])


def cut_back(path: Path, step: int, header: Sequence[str]) -> None:
    """Leave the lines up to ``step`` of a CSV whose first column is the step; a line torn by a kill is dropped."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if len(row) == len(header)]
        kept = [row for row in rows if row[0].isdigit() and int(row[0]) <= step]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *kept])
    partial.replace(path)


class RunLog:
    """All three, for the first rank; silent on the others.

    Args:
        batch_size: images of a step, over all ranks.
    """

    def __init__(self, output: Path, step: int, total_steps: int, batch_size: int, silent: bool) -> None:
        self._output, self._step, self._silent = output, step, silent
        self._batch_size = batch_size
        self._csv: LossLog | None = None
        self._events: SummaryWriter | None = None
        self._bar = tqdm(total=total_steps * batch_size, initial=step * batch_size, unit="img", disable=silent)

    def __enter__(self) -> Self:
        if not self._silent:
            self._events = SummaryWriter(str(self._output / "tensorboard"), purge_step=self._step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._csv is not None:
            self._csv.close()
        if self._events is not None:
            self._events.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """One step; ``values`` have the same keys at every step, ``loss`` among them."""
        if self._silent:
            return
        if self._csv is None:
            self._csv = LossLog(self._output / LOSSES, self._step, list(values))
        self._csv.add(step, *values.values())
        if self._events is not None and step % TENSORBOARD_EVERY == 0:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        self._bar.update(self._batch_size)
        self._bar.set_postfix({k: f"{v:.3g}" for k, v in values.items() if k in ("loss", "scale")})

    def judge(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a validation set, into validation.csv and TensorBoard."""
        if self._silent:
            return
        path = self._output / VALIDATION
        cut_back(path, step - 1, ("step", "measure", "value"))
        with path.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([step, name, repr(value)] for name, value in values.items())
        for name, value in values.items():
            tqdm.write(f"step {step}: {name} {value:.4f}")
            if self._events is not None:
                self._events.add_scalar(name, value, step)
