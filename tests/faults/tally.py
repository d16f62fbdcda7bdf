"""Tally of kills and violations, printed at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Tally:
    """Kills by activity, interrupted requests, and the number of broken guarantees."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        self.interrupted: Counter[str] = Counter()
        self._violations = 0

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Context of the checks after a kill. Counts failed assertions."""
        try:
            yield
        except AssertionError:
            self._violations += 1
            raise

    def lines(self) -> list[str]:
        if not self.kills:
            return []
        said = [f"{self.kills.total()} kills by SIGKILL, violations: {self._violations}"]
        said += [f"  {count:4d} during {kind}" for kind, count in sorted(self.kills.items())]
        if self.interrupted:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.interrupted.items()))
            said.append(f"requests that were under way and never answered: {counts}")
        return said
