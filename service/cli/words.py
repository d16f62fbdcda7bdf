"""Plain-language texts for probabilities, decisions and rejection reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kith.wire.identifiers import CONTROL_CHARACTERS

if TYPE_CHECKING:
    from kith.wire.identification import IdentityOut

CONTROL_PATTERN: Final = re.compile(f"[{CONTROL_CHARACTERS}]")
MIN_ODDS: Final = 1e-9
MIN_PERCENTAGE_ODDS: Final = 0.1
OUTCOME_WORDS: Final = {"rejected_quality": "not usable", "rejected_liveness": "not accepted as a live person"}
REASON_WORDS: Final = {
    "eye_distance_px": "too small",
    "sharpness": "blurred",
    "brightness": "too dark or too bright",
    "contrast": "low contrast",
    "yaw": "turned away",
    "not_judged": "too little space around it",
    "risk_out_of_reach": "no similarity meets the risk",
    "weak_detection": "perhaps not upright",
    "try_detail_medium": "detail medium turns the photo",
    "known_stranger": "a known stranger, not this person",
    "same_person_elsewhere": "another face of the photo is this person",
}


def replace_controls(text: str) -> str:
    """Replace each control character with U+FFFD, so that stored text is safe to print."""
    return CONTROL_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)


def format_odds(chance: float, is_bound: bool | None = False) -> str:
    """Format a probability: '1 in 3,000', '40 in 100', and a bound 'less than 1 in 200,000'."""
    if is_bound or chance < MIN_ODDS:
        return f"less than 1 in {_two_digits(1 / max(chance, MIN_ODDS)):,}"
    if chance > MIN_PERCENTAGE_ODDS:
        return f"{min(100, round(100 * chance))} in 100"
    return f"1 in {_two_digits(1 / chance):,}"


def format_ratio(odds: float) -> str:
    """Format odds: '3 to 1', '1 to 400'."""
    return f"{_two_digits(odds):,} to 1" if odds >= 1 else f"1 to {_two_digits(1 / odds):,}"


def describe_outcome(outcome: str, who: str | None) -> str:
    """Return the outcome in words. ``who``: the identified person, or the one that an uncertain face resembles."""
    if who and outcome in ("identified", "uncertain"):
        return who if outcome == "identified" else f"perhaps {who}"
    return OUTCOME_WORDS.get(outcome, outcome.replace("_", " "))


def describe_result(result: IdentityOut) -> str:
    """Return the decision on a face in words, with the name of the person."""
    likely = next((each.name or each.subject for each in result.candidates), None)
    return describe_outcome(result.outcome, result.name or result.subject or likely)


def describe_reasons(reasons: Iterable[str]) -> str:
    """Return the rejection reasons of the quality gate in words."""
    return ", ".join(REASON_WORDS.get(reason, reason.replace("_", " ")) for reason in reasons)


def _two_digits(value: float) -> int:
    step = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(round(value / step) * step)
