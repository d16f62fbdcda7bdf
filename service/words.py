"""Chances, decisions and names in words. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

CONTROLS: Final = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""What orders a terminal about, breaks a line, or turns the text around it (Unicode's Cc, Zl, Zp, and embeddings,
overrides and isolates), as a regular expression's class. The joiners and marks that names are written with stay."""
CONTROL: Final = re.compile(f"[{CONTROLS}]")
RAREST: Final = 1e-9
OFTEN: Final = 0.1
DECISIONS: Final = {"rejected_quality": "too poor to tell", "rejected_liveness": "not taken for a living person"}
REASONS: Final = {
    "eye_distance_px": "too small",
    "sharpness": "blurred",
    "brightness": "too dark or too bright",
    "contrast": "too pale",
    "yaw": "turned away",
    "not_judged": "too little around it",
    "risk_out_of_reach": "no similarity keeps to the risk",
}


def shown(text: str) -> str:
    """As people may be shown it, whatever is stored: a sign in the place of each of CONTROLS."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def odds(chance: float) -> str:
    """A probability as people say it: '1 in 3,000', '40 in 100', 'less than 1 in 1,000,000,000'."""
    if chance < RAREST:
        return f"less than 1 in {round(1 / RAREST):,}"
    if chance > OFTEN:
        return f"{min(100, round(100 * chance))} in 100"
    return f"1 in {_two_digits(1 / chance):,}"


def decision(outcome: str, who: str | None) -> str:
    """What to call it: the person where one is named."""
    return who if outcome == "identified" and who else DECISIONS.get(outcome, outcome.replace("_", " "))


def in_words(reasons: Iterable[str]) -> str:
    """Why a face cannot be used, as the gate's values name it."""
    return ", ".join(REASONS.get(reason, reason.replace("_", " ")) for reason in reasons)


def _two_digits(value: float) -> int:
    step = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(round(value / step) * step)
