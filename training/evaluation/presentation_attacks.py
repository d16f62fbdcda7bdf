"""Error rates of presentation attack detection (ISO/IEC 30107-3). A larger score means more likely live.

A presentation is accepted as live if its score is at least the threshold. APCER(t) is the share of an instrument's
attacks that are accepted, BPCER(t) the share of live (bona fide) presentations that are not. Both count judged
presentations only. APCER stands for its worst instrument: a mean would hide an instrument that passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.risk.miss_rate import wilson
from models.risk.search_rates import threshold_at_fpir
from training.evaluation.metrics import Bools, Floats
from training.liveness.data import LIVE

APCER_POINTS: Final = (0.05, 0.1)
"""APCER at which the standard reports BPCER: BPCER20 and BPCER10."""


def threshold_at_apcer(scores: Floats, instruments: NDArray[np.str_], apcer: float) -> float:
    """Return the lowest threshold at which no instrument's APCER exceeds ``apcer``, in [0, 1).

    Args:
        scores: (n,) in [0, 1].
        instruments: (n,) instrument of each presentation, or LIVE; at least one attack.
        apcer: limit of every instrument.
    """
    names = set(instruments.tolist()) - {LIVE}
    return max(threshold_at_fpir(scores[instruments == name], apcer) for name in names)


def measure_presentations(
    scores: Floats, instruments: NDArray[np.str_], people: NDArray[np.str_], threshold: float
) -> dict[str, Any]:
    """Return BPCER, the APCER of each instrument, and the BPCER at APCER_POINTS, as a JSON-ready document.

    Each rate has Wilson's 95 % interval with as many observations as people, because a person's photos fail together.
    The threshold of an APCER point is chosen on these presentations, as the standard does.

    Args:
        scores: (n,) in [0, 1].
        instruments: (n,) instrument of each presentation, or LIVE; both kinds must occur.
        people: (n,) person of each.
        threshold: smallest score that is accepted.
    """
    live = instruments == LIVE
    attacks = {name: instruments == name for name in sorted(set(instruments.tolist()) - {LIVE})}
    points = {point: threshold_at_apcer(scores, instruments, point) for point in APCER_POINTS}
    return {
        "threshold": threshold,
        "bpcer": _rate(scores[live] < threshold, people[live]),
        "apcer": {name: _rate(scores[rows] >= threshold, people[rows]) for name, rows in attacks.items()},
        "bpcer_at_apcer": {f"{point:g}": _rate(scores[live] < at, people[live]) for point, at in points.items()},
    }


def _rate(wrong: Bools, people: NDArray[np.str_]) -> dict[str, Any]:
    count = len(np.unique(people))
    return {**asdict(wilson(float(wrong.mean()) * count, count)), "presentations": len(wrong), "people": count}


def presentation_rows(figures: Mapping[str, Any], not_judged: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the figures of `measure_presentations` as rows of a table, the worst instrument first."""
    by_rate = sorted(figures["apcer"].items(), key=lambda item: -item[1]["value"])
    rates = [(f"APCER, {name}{', worst' * (i == 0)}", rate) for i, (name, rate) in enumerate(by_rate)]
    rates.append(("BPCER", figures["bpcer"]))
    rates += [(f"BPCER at APCER {float(point):.0%}", rate) for point, rate in figures["bpcer_at_apcer"].items()]
    missing = ", ".join(f"{name} {count}" for name, count in not_judged.items())
    return [
        ("Threshold", f"{figures['threshold']:.4f}"),
        *((name, _describe(rate)) for name, rate in rates),
        ("Photos not judged", missing),
    ]


def _describe(rate: Mapping[str, Any]) -> str:
    interval = f"{rate['low']:.1%} to {rate['high']:.1%}"
    return f"{rate['value']:.1%} (95 %: {interval}; {rate['presentations']} photos of {rate['people']} people)"
