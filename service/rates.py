"""How fast each engine runs a pack's networks on this machine, in each of its numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.engines import MAX_POINTS_LOST, Choice, Spec, Wish, abilities, choose, open_chosen, usual_shape
from models.errors import RuntimeUnavailableError
from models.network import Engine, Network, Precision
from models.pack import ModelPack
from service.settings import Settings

BATCHES: Final = (1, 8)
ROUNDS: Final = 5
ROUND_S: Final = 0.15
CLEARLY_FASTER: Final = 0.95


@dataclass(frozen=True)
class Rate:
    """``milliseconds``: median per item, alone and in a batch of 8. ``points_lost``: None where nobody measured.
    ``chosen``: at start, by the settings."""

    network: str
    engine: Engine
    precision: Precision
    milliseconds: tuple[float, float]
    points_lost: float | None
    chosen: bool


@dataclass(frozen=True)
class Rates:
    rates: list[Rate]
    advice: str


def measure(pack: ModelPack, settings: Settings) -> Rates:
    """Run both networks on the CPU by every engine, by turns, so that what else the machine does meets all alike.

    Raises:
        RuntimeUnavailableError: no engine is installed, or what is pinned is not.
    """
    rates = [rate for spec in (pack.detection, pack.recognition) for rate in _measure(spec, settings.wish)]
    if settings.wish.wants_gpu:
        return Rates(
            rates, "these are the CPU's rates, and a GPU is wanted (KITH_DEVICE): `make bench-gpu` measures it"
        )
    return Rates(rates, advise(rates))


def advise(rates: Sequence[Rate]) -> str:
    """Settings that are clearly faster than the choice at start and known to lose no more than it may."""
    networks = {rate.network for rate in rates}
    chosen = sum(rate.milliseconds[0] for rate in rates if rate.chosen)
    totals: dict[tuple[Engine, Precision], float] = {}
    for pin in {(rate.engine, rate.precision) for rate in rates}:
        rows = [rate for rate in rates if (rate.engine, rate.precision) == pin]
        harmless = all(rate.precision != "int8" or _is_harmless(rate.points_lost) for rate in rows)
        if {rate.network for rate in rows} == networks and harmless:
            totals[pin] = sum(rate.milliseconds[0] for rate in rows)
    if totals and totals[best := min(totals, key=lambda pin: totals[pin])] < CLEARLY_FASTER * chosen:
        return (
            f"KITH_ENGINE={best[0]} KITH_PRECISION={best[1]} needs {totals[best] / chosen:.0%} of the time of "
            "the choice at start"
        )
    return "the choice at start is as fast as any"


def _is_harmless(points_lost: float | None) -> bool:
    return points_lost is not None and points_lost <= MAX_POINTS_LOST


def _measure(spec: Spec, wish: Wish) -> list[Rate]:
    able = abilities()
    chosen = None if wish.wants_gpu else choose(spec, wish, able)
    kept: list[tuple[Choice, Network]] = []
    for engine, fast in able.items():
        for precision in sorted(fast):
            if precision == "int8" and not any(v.precision == "int8" for v in spec.variants):
                continue
            choice = Choice(engine, precision, "")
            try:
                kept.append((choice, open_chosen(spec, choice, Wish(threads=wish.threads))))
            except RuntimeUnavailableError:
                continue  # an engine that cannot open this file has no rate
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for row, (_, network) in enumerate(kept):
            for batch in BATCHES:
                times.setdefault((row, batch), []).append(_time(network, (batch, *usual_shape(spec, network))))
    lost = {variant.precision: variant.points_lost for variant in spec.variants}
    return [
        Rate(
            spec.path.name,
            choice.engine,
            choice.precision,
            (statistics.median(times[row, BATCHES[0]]), statistics.median(times[row, BATCHES[1]])),
            0.0 if choice.precision == "fp32" else lost.get(choice.precision),
            chosen is not None and (choice.engine, choice.precision) == (chosen.engine, chosen.precision),
        )
        for row, (choice, _) in enumerate(kept)
    ]


def _time(network: Network, shape: tuple[int, ...]) -> float:
    """Median milliseconds per item of one round."""
    batch = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    network.run(batch)
    taken: list[float] = []
    end = time.perf_counter() + ROUND_S
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        network.run(batch)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken) / len(batch)
