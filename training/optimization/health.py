"""Warnings about runs that fail without an error: wrong angles, stuck losses, dead embeddings, hidden clipping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from training.bounds import fixed_scale
from training.config import HeadConfig, LoopConfig

WINDOW_STEPS = 50
MAX_ANGLE_DEG = 90.0
MIN_NORM = 1e-3
MIN_SPREAD = 0.01
MIN_CLIP = 0.1
STUCK_WINDOWS = 4
MIN_PROGRESS = 0.02
"""Share of the first loss after warm-up by which the loss must have fallen after STUCK_WINDOWS windows."""
NON_FINITE_REMEDY = (
    "Lower loop.learning_rate or head.scale, raise loop.warmup_steps, or set loop.precision=fp32. The last checkpoint "
    "is kept"
)


class RunHealth:
    """Checks the logged values of each step after warm-up and warns about each problem once.

    Args:
        num_classes: C, for the recommended scale.
        window: number of steps that a mean covers.
    """

    def __init__(self, loop: LoopConfig, head: HeadConfig, num_classes: int, window: int = WINDOW_STEPS) -> None:
        self._first = max(loop.warmup_steps, loop.margin_warmup_steps)
        self._head, self._classes, self._window = head, num_classes, window
        self._recent: deque[Mapping[str, float]] = deque(maxlen=window)
        self._start: tuple[int, float] | None = None
        self._reported: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return new warnings after a step."""
        if step <= self._first:
            return []
        self._recent.append(values)
        if len(self._recent) < self._window:
            return []
        means = {name: sum(row[name] for row in self._recent) / self._window for name in values}
        if self._start is None:
            self._start = step, means["loss"]
        found = [(kind, text) for kind, text in self._problems(step, means) if kind not in self._reported]
        self._reported.update(kind for kind, _ in found)
        return [f"step {step}: {text}" for _, text in found]

    def _problems(self, step: int, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        angle = means.get("target_angle_deg", 0.0)
        if angle > MAX_ANGLE_DEG:
            yield (
                "angle",
                f"the mean target angle is {angle:.0f} degrees: embeddings avoid their class. {self._soften()}",
            )
        if means["embedding_norm"] < MIN_NORM:
            yield "norm", f"embeddings have length {means['embedding_norm']:.1e}: dead. Lower loop.learning_rate"
        elif means["embedding_spread"] < MIN_SPREAD:
            yield (
                "spread",
                (
                    f"all embeddings point in one direction (spread {means['embedding_spread']:.3f}). Lower "
                    "loop.learning_rate, or add a head with classes"
                ),
            )
        for name in ("backbone", "head"):
            factor = means.get(f"clip_{name}", 1.0)
            if factor < MIN_CLIP:
                rate = factor * means["learning_rate"]
                yield (
                    f"clip_{name}",
                    (
                        f"clipping scales the gradient of the {name} by {factor:.2f}, to a rate of {rate:.2g}. "
                        "Raise loop.gradient_clip or set it to 0 (off)"
                    ),
                )
        if self._start is not None and step >= self._start[0] + STUCK_WINDOWS * self._window:
            since, before = self._start
            if means["loss"] > before - MIN_PROGRESS * abs(before):
                yield "stuck", f"the loss is {means['loss']:.4g}, at step {since} it was {before:.4g}. {self._soften()}"

    def _soften(self) -> str:
        """Return what makes the head's task easier."""
        scale = f"head.scale={fixed_scale(self._classes):.1f}, " if self._classes >= 3 else ""
        advice = f"Set {scale}a smaller head.margin or a longer loop.margin_warmup_steps"
        if self._head.name == "arcface" and self._head.options.get("beyond", "linear") == "linear":
            advice += ", or head.beyond=continuous (linear has a minimum beyond 90 degrees)"
        return advice
