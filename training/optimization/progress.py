"""Progress of a run: one line that changes on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from tqdm import tqdm

from training.progress import LOG_INTERVAL_S

FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "learning_rate": "rate {:.3g}".format,
    "loss": "loss {:.3g}".format,
    "target_angle_deg": "angle {:.0f}°".format,
    "accuracy": "accuracy {:.1%}".format,
}
"""Logged values that the line shows, in this order."""
log = logging.getLogger(__name__)


class Progress:
    """Line with epoch, step, values, images per second and remaining time, both by the mean of all steps since the
    start or resumption: the load of the moment changes them little.

    Args:
        step: steps that were taken before.
        epoch_steps: steps of an epoch.
        batch_size: images per step, over all ranks.
    """

    def __init__(self, step: int, total_steps: int, epoch_steps: int, batch_size: int, silent: bool = False) -> None:
        self._total, self._epoch, self._batch_size = total_steps, epoch_steps, batch_size
        terminal = sys.stderr.isatty()
        self._logs = not silent and not terminal
        self._bar = tqdm(
            total=total_steps * batch_size,
            initial=step * batch_size,
            unit="img",
            disable=silent or not terminal,
            bar_format="{desc}, {remaining} left{postfix}, {rate_noinv_fmt}",
            dynamic_ncols=True,
            smoothing=0,
        )
        self._began = step
        self._began_at = self._logged_at = time.monotonic()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values after a step."""
        if self._logs:
            self._log(step, values)
        elif not self._bar.disable:
            self._bar.set_description_str(self.place(step), refresh=False)
            self._bar.set_postfix_str(describe(values), refresh=False)
            self._bar.update(self._batch_size)

    def close(self) -> None:
        self._bar.close()

    def place(self, step: int) -> str:
        """Return epoch and step."""
        return (
            f"epoch {math.ceil(step / self._epoch)}/{math.ceil(self._total / self._epoch)}, step {step}/{self._total}"
        )

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line if the last one is old, and at the end."""
        now = time.monotonic()
        if now - self._logged_at < LOG_INTERVAL_S and step < self._total:
            return
        speed = (step - self._began) / max(now - self._began_at, 1e-9)
        left = tqdm.format_interval((self._total - step) / speed)
        log.info("%s, %s left, %s, %.0fimg/s", self.place(step), left, describe(values), speed * self._batch_size)
        self._logged_at = now


def describe(values: Mapping[str, float]) -> str:
    """Return the values that the line shows."""
    return ", ".join(show(values[name]) for name, show in FORMATS.items() if name in values)
