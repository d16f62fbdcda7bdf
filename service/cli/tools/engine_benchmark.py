"""Benchmark of a pack's networks on this machine, by engine and precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.engines.selection import (
    EngineChoice,
    EnginePreference,
    available_precisions,
    choose_engine,
    open_with_engine,
)
from models.errors import ModelError
from models.pack.loading import BUNDLED_PACK
from models.pack.manifest import ModelPack
from models.runtime.network import Engine, Network, Precision
from models.runtime.onnx_runtime import has_fast_int8
from models.vision.detection import CANVAS_BUCKETS_PX
from models.vision.specs import DetectionSpec, NetworkSpec, Variant
from service.settings import Settings

BATCH_SIZES: Final = (1, 8)
ROUNDS: Final = 5
ROUND_S: Final = 0.15
MAX_RELATIVE_TIME: Final = 0.95
"""Share of the default's time below which other settings are recommended."""


@dataclass(frozen=True)
class EngineRate:
    """Speed of a network on one engine.

    Attributes:
        milliseconds: median per item, for each of BATCH_SIZES.
        loss: loss against fp32.
        accurate: the loss permits to choose this precision automatically.
        chosen: the settings select this engine and precision.
    """

    network: str
    engine: Engine
    precision: Precision
    milliseconds: tuple[float, float]
    loss: str
    accurate: bool
    chosen: bool


@dataclass(frozen=True)
class EngineBenchmark:
    """Rates of every engine, and the recommended settings."""

    rates: list[EngineRate]
    advice: str


def measure(pack: ModelPack, settings: Settings) -> EngineBenchmark:
    """Run both networks on the CPU with every engine, in alternating rounds so that other load affects all alike.

    Raises:
        RuntimeUnavailableError: no engine is installed, or the configured engine is missing.
    """
    rates = [rate for spec in (pack.detection, pack.recognition) for rate in _measure(spec, settings.wish)]
    if settings.wish.wants_gpu:
        return EngineBenchmark(
            rates, "These are CPU rates, but KITH_DEVICE requests a GPU. Run `make bench-gpu` to measure the GPU."
        )
    advice = advise(rates)
    # The bundled pack has no INT8 on purpose: it misses more people than it saves time (docs/pack-format.md).
    if has_fast_int8() and not pack.has_int8 and pack.directory != BUNDLED_PACK:
        advice += f" INT8 may be faster on this processor: `kith models quantize {pack.directory} --photos FOLDER`."
    return EngineBenchmark(rates, advice)


def advise(rates: Sequence[EngineRate]) -> str:
    """Return the settings that are clearly faster than the default, within the allowed loss of accuracy."""
    networks = {rate.network for rate in rates}
    chosen = sum(rate.milliseconds[0] for rate in rates if rate.chosen)
    totals: dict[tuple[Engine, Precision], float] = {}
    for setting in {(rate.engine, rate.precision) for rate in rates}:
        rows = [rate for rate in rates if (rate.engine, rate.precision) == setting]
        if {rate.network for rate in rows} == networks and all(rate.accurate for rate in rows):
            totals[setting] = sum(rate.milliseconds[0] for rate in rows)
    if totals and totals[best := min(totals, key=lambda setting: totals[setting])] < MAX_RELATIVE_TIME * chosen:
        return (
            f"KITH_ENGINE={best[0]} KITH_PRECISION={best[1]} needs {totals[best] / chosen:.0%} of the time of the "
            "default."
        )
    return "The default is as fast as any other setting."


def _measure(spec: NetworkSpec, wish: EnginePreference) -> list[EngineRate]:
    available = available_precisions()
    chosen = None if wish.wants_gpu else choose_engine(spec, wish, available)
    opened: list[tuple[EngineChoice, Network]] = []
    for engine, precisions in available.items():
        for precision in sorted(precisions):
            if precision == "int8" and not any(v.precision == "int8" for v in spec.variants):
                continue
            choice = EngineChoice(engine, precision, "")
            try:
                opened.append((choice, open_with_engine(spec, choice, EnginePreference(threads=wish.threads))))
            except ModelError:
                continue  # this engine cannot open this file
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for row, (_, network) in enumerate(opened):
            for batch in BATCH_SIZES:
                times.setdefault((row, batch), []).append(_time(network, (batch, *_input_shape(spec, network))))
    variants = {variant.precision: variant for variant in spec.variants}
    return [
        EngineRate(
            spec.path.name,
            choice.engine,
            choice.precision,
            (statistics.median(times[row, BATCH_SIZES[0]]), statistics.median(times[row, BATCH_SIZES[1]])),
            _describe_loss(variants.get(choice.precision), choice),
            choice.precision != "int8" or variants["int8"].is_accurate(choice.engine),
            chosen is not None and (choice.engine, choice.precision) == (chosen.engine, chosen.precision),
        )
        for row, (choice, _) in enumerate(opened)
    ]


def _describe_loss(variant: Variant | None, choice: EngineChoice) -> str:
    if variant is None:
        return "none" if choice.precision == "fp32" else "not measured"
    return variant.describe_loss(choice.engine)


def _input_shape(spec: NetworkSpec, network: Network) -> tuple[int, int, int]:
    """Return the (channels, height, width) of a crop, or of the smallest canvas of a detector."""
    sides = (CANVAS_BUCKETS_PX[0],) * 2 if isinstance(spec, DetectionSpec) else spec.shape
    fixed = zip(network.input_shape[2:], sides, strict=True)
    height, width = (declared if isinstance(declared, int) else side for declared, side in fixed)
    return 3, height, width


def _time(network: Network, shape: tuple[int, ...]) -> float:
    """Return the median milliseconds per item of one round."""
    batch = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    network.run(batch)
    taken: list[float] = []
    end = time.perf_counter() + ROUND_S
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        network.run(batch)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken) / len(batch)
