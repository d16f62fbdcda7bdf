"""Progress of long work: a line that changes on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Final, TypeVar

from tqdm import tqdm

LOG_INTERVAL_S: Final = 30.0
"""Least time between two lines where no terminal shows the progress, such as in a file."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def track(items: Iterable[T], what: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield items, and show how many are done and how long the others take, by the mean time of those done."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        yield from tqdm(items, what, total, unit=f" {unit}", smoothing=0, delay=2)
        return
    began = logged = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - logged >= LOG_INTERVAL_S:
            left = f", {tqdm.format_interval((total - done) * (now - began) / done)} left" if total and done else ""
            log.info("%s: %d%s %s%s", what, done, f" of {total}" if total else "", unit, left)
            logged = now
        yield item
