"""Map a search's similarities to the scale of a client with fixed cut-offs. Pure.

A client of CompreFace compares similarities with its own cut-offs. The map places the thresholds of each search on
these cut-offs, so that the client decides as the gallery does, at the gallery's risk, whatever the gallery's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

STEP: Final = 0.0001
"""Resolution of a similarity in a response. Double Take rounds to it, so that a smaller gap would be lost."""
DIGITS: Final = 4
CLIENT_DETECTION: Final = 0.8
"""Detection threshold of CompreFace's server, Double Take and Viseron."""
Level = Literal["known", "maybe", "unknown"]
LEVELS: Final[dict[str, Level]] = {
    "identified": "known",
    "same": "known",
    "uncertain": "maybe",
}
"""Levels of outcomes. All other outcomes are unknown."""


@dataclass(frozen=True)
class Cutoffs:
    """Cut-offs of a client, 0 < ``unknown`` < ``maybe`` <= ``known`` < 1.

    A match gets a similarity of at least ``known``, an uncertain face one in [``unknown``, ``maybe``), and every other
    face one below ``unknown``. Any cut-off in [``maybe``, ``known``] therefore accepts exactly the matches.
    """

    known: float
    maybe: float
    unknown: float

    def __post_init__(self) -> None:
        rounded = all(round(value, DIGITS) == value for value in (self.known, self.maybe, self.unknown))
        if not (rounded and 0 < self.unknown < self.maybe <= self.known < 1):
            raise ValueError(
                "give known, maybe and unknown with at most four decimals, such as 0.6,0.6,0.4: above 0, below 1, "
                "unknown below maybe, maybe at most known"
            )


PRESETS: Final = {
    "sdk": Cutoffs(known=0.9, maybe=0.5, unknown=0.4),
    "double-take": Cutoffs(known=0.6, maybe=0.6, unknown=0.4),
}


def to_probability(score: float, min_score: float) -> float:
    """Return a detection score on the client's scale. ``min_score``: KITH_DETECTION_SCORE, mapped to CLIENT_DETECTION.

    Detectors differ in their scores. With their fixed thresholds, clients then get the faces that Kith reports.
    """
    share = (score - min_score) / (1 - min_score)
    return round(CLIENT_DETECTION + max(0.0, share) * (1 - CLIENT_DETECTION), DIGITS)


def parse_cutoffs(text: str) -> Cutoffs:
    """Return the preset of this name, or the three numbers "known,maybe,unknown". Raises ValueError."""
    if text in PRESETS:
        return PRESETS[text]
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"give {', '.join(PRESETS)}, or three numbers: known,maybe,unknown")
    known, maybe, unknown = (float(part) for part in parts)
    return Cutoffs(known, maybe, unknown)


def level_of(outcome: str) -> Level:
    """Return the level of an outcome of an identification or a verification."""
    return LEVELS.get(outcome, "unknown")


def level_of_candidate(similarity: float, review: float, best: Level) -> Level:
    """Return the level of a candidate after the best one. It never passes for a match, nor above the ``best``."""
    return "maybe" if similarity >= review and best != "unknown" else "unknown"


def to_client(similarity: float, accept: float, review: float, level: Level, cutoffs: Cutoffs) -> float:
    """Return the similarity on the client's scale, in [0, 1].

    Within a level it increases linearly with the cosine ``similarity``. The order of the levels is that of the
    thresholds ``accept`` and ``review``, so that the whole map is monotonic.
    """
    if level == "known":
        (low, high), (start, end) = (accept, 1.0), (cutoffs.known, 1.0)
    elif level == "maybe":
        (low, high), (start, end) = (review, min(accept, 1.0)), (cutoffs.unknown, cutoffs.maybe - STEP)
    else:
        (low, high), (start, end) = (-1.0, min(review, 1.0)), (0.0, cutoffs.unknown - STEP)
    share = 0.0 if high <= low else min(1.0, max(0.0, (similarity - low) / (high - low)))
    return round(start + share * (end - start), DIGITS)
