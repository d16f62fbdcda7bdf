"""Warnings about runs that fail without an error: wrong angles, stuck losses, dead embeddings, hidden clipping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from training.bounds import fixed_scale
from training.config import HeadConfig

WINDOW_STEPS = 50
MIN_WINDOW_STEPS = 3
WINDOWS = 100
"""Windows of a short run."""
FIRST_SHARE, JUDGED_SHARE = 0.01, 0.04
"""Shares of a run after which its first values are taken, and after which they must have improved."""
MAX_ANGLE_DEG = 90.0
MIN_TURN_DEG = 1.0
"""Fall of the mean target angle between FIRST_SHARE and JUDGED_SHARE in a run that learns."""
MIN_NORM = 1e-3
MIN_SPREAD = 0.01
MIN_CLIP = 0.1
MIN_PROGRESS = 0.02
"""Share of the loss by which it must have fallen, if there is no target angle."""


class RunHealth:
    """Checks the logged values of each step and warns about each problem once, first within 5 % of the run.
    ``num_classes``: C, for the recommended scale."""

    def __init__(self, total_steps: int, head: HeadConfig, num_classes: int) -> None:
        self._first, self._judged = FIRST_SHARE * total_steps, JUDGED_SHARE * total_steps
        self._window = min(WINDOW_STEPS, max(MIN_WINDOW_STEPS, total_steps // WINDOWS))
        self._head, self._classes = head, num_classes
        self._recent: deque[Mapping[str, float]] = deque(maxlen=self._window)
        self._start: tuple[int, Mapping[str, float]] | None = None
        self._began = 0
        self._reported: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return new warnings after a step."""
        if step <= self._first:
            return []
        self._began = self._began or step
        self._recent.append(values)
        if len(self._recent) < self._window:
            return []
        means = {name: sum(row[name] for row in self._recent) / self._window for name in values}
        if self._start is None and (step <= self._judged or self._began == 1):  # else the run was resumed later
            self._start = step, means
        found = [(kind, text) for kind, text in self._problems(step, means) if kind not in self._reported]
        self._reported.update(kind for kind, _ in found)
        return [f"step {step}: {text}" for _, text in found]

    def _problems(self, step: int, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        angle = means.get("target_angle_deg", 0.0)
        if angle > MAX_ANGLE_DEG:
            text = f"the mean target angle is {angle:.0f} degrees: embeddings avoid their class. {self._soften()}"
            yield "angle", text
        if means["embedding_norm"] < MIN_NORM:
            yield "norm", f"embeddings have length {means['embedding_norm']:.1e}: dead. Lower loop.learning_rate"
        elif means["embedding_spread"] < MIN_SPREAD:
            text = f"all embeddings point in one direction (spread {means['embedding_spread']:.3f})"
            yield "spread", f"{text}. Lower loop.learning_rate, or add a head with classes"
        for name in ("backbone", "head"):
            factor = means.get(f"clip_{name}", 1.0)
            if factor < MIN_CLIP:
                rate = factor * means["learning_rate"]
                text = f"clipping scales the gradient of the {name} by {factor:.2f}, to a rate of {rate:.2g}"
                yield f"clip_{name}", f"{text}. Raise loop.gradient_clip or set it to 0 (off)"
        if self._start is not None and step >= max(self._judged, self._start[0] + self._window):
            yield from self._stuck(means, *self._start)

    def _stuck(self, means: Mapping[str, float], since: int, first: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Judge by the target angle where there is one: a growing margin raises the loss of a run that learns."""
        if (angle := means.get("target_angle_deg")) is not None:
            if MAX_ANGLE_DEG >= angle > first["target_angle_deg"] - MIN_TURN_DEG:  # beyond 90, another warning says it
                before = first["target_angle_deg"]
                text = f"the mean target angle is {angle:.1f} degrees, at step {since} it was {before:.1f}"
                yield "stuck", f"{text}: nothing is learned. {self._soften()}"
        elif means["loss"] > first["loss"] - MIN_PROGRESS * abs(first["loss"]):
            text = f"the loss is {means['loss']:.4g}, at step {since} it was {first['loss']:.4g}. {self._soften()}"
            yield "stuck", text

    def _soften(self) -> str:
        """Return what makes the head's task easier."""
        scale = f"head.scale={fixed_scale(self._classes):.1f}, " if self._classes >= 3 else ""
        advice = f"Set {scale}a smaller head.margin or a larger loop.margin_warmup"
        if self._head.name == "arcface" and self._head.options.get("beyond", "linear") == "linear":
            advice += ", or head.beyond=continuous (linear has a minimum beyond 90 degrees)"
        return advice
