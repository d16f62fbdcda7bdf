"""Progress of long work: a line that changes on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from tqdm import tqdm

LOG_INTERVAL_S: Final = 30.0
"""Least time between two lines where no terminal shows the progress, such as in a file."""
FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "learning_rate": "rate {:.3g}".format,
    "loss": "loss {:.3g}".format,
    "target_angle_deg": "angle {:.0f}°".format,
    "accuracy": "accuracy {:.1%}".format,
}
"""Logged values that the line of a run shows, in this order."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class _Log:
    """Stream that writes each line to the log."""

    def write(self, text: str) -> None:
        if text.strip():
            log.info(text.strip())


def _line(items: Iterable[T] | None = None, **options: Any) -> tqdm[T]:
    """Return a progress bar. Its remaining time follows the mean speed since the start, which a short load hardly
    changes."""
    if not sys.stderr.isatty():
        options |= {"file": _Log(), "mininterval": LOG_INTERVAL_S, "miniters": 1}
    return tqdm(items, smoothing=0, **options)


def track(items: Iterable[T], what: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield items, and show how many are done and how long the others take."""
    options: dict[str, Any] = {"delay": 2}
    if not sys.stderr.isatty():
        options = {"delay": LOG_INTERVAL_S, "bar_format": "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left"}
    yield from _line(items, desc=what, total=total, unit=f" {unit}", **options)


class RunProgress:
    """Line with epoch, step, values, images per second and remaining time.

    Args:
        step: steps that were taken before.
        epoch_steps: steps of an epoch.
        batch_size: images per step, over all ranks.
    """

    def __init__(self, step: int, total_steps: int, epoch_steps: int, batch_size: int, silent: bool = False) -> None:
        self._total, self._epoch, self._batch_size = total_steps, epoch_steps, batch_size
        self._bar = _line(
            total=total_steps * batch_size,
            initial=step * batch_size,
            unit="img",
            desc=self._place(step),
            disable=silent,
            bar_format="{desc}, {remaining} left{postfix}, {rate_noinv_fmt}",
            dynamic_ncols=True,
        )

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values after a step."""
        if not self._bar.disable:
            shown = (show(values[name]) for name, show in FORMATS.items() if name in values)
            self._bar.set_description_str(self._place(step), refresh=False)
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(self._batch_size)

    def close(self) -> None:
        self._bar.close()

    def _place(self, step: int) -> str:
        epochs = math.ceil(self._total / self._epoch)
        return f"epoch {math.ceil(step / self._epoch)}/{epochs}, step {step}/{self._total}"
