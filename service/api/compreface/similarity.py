"""Map a search's similarities to the scale of a client with a fixed cut-off. Pure.

A client of CompreFace compares similarities with its own cut-off. The map places the thresholds of each search around
the cut-offs in use, so that the client decides as the gallery does, at the gallery's risk, whatever the gallery's size.
"""

from __future__ import annotations

from typing import Final, Literal

from models.vision.detection import DEFAULT_MIN_SCORE

STEP: Final = 0.0001
"""Resolution of a similarity in a response. Double Take rounds to it, so that a smaller gap would be lost."""
DIGITS: Final = 4
CLIENT_DETECTION: Final = 0.8
"""Detection threshold of CompreFace's server, Double Take and Viseron."""
KNOWN: Final = 0.9
"""Minimum similarity of a match, the highest cut-off that clients use."""
MAYBE: Final = 0.5
"""Similarities of uncertain faces are below it: every cut-off from MAYBE to KNOWN accepts exactly the matches."""
UNKNOWN: Final = 0.4
"""Minimum similarity of an uncertain face. Double Take names no face below it."""
Level = Literal["known", "maybe", "unknown"]
LEVELS: Final[dict[str, Level]] = {"identified": "known", "uncertain": "maybe"}
"""Levels of outcomes. All other outcomes are unknown."""


def to_probability(score: float) -> float:
    """Return a detection score on the client's scale, where DEFAULT_MIN_SCORE is CLIENT_DETECTION.

    Detectors differ in their scores. With their fixed thresholds, clients then get the faces that Kith reports.
    """
    share = (score - DEFAULT_MIN_SCORE) / (1 - DEFAULT_MIN_SCORE)
    return round(CLIENT_DETECTION + max(0.0, share) * (1 - CLIENT_DETECTION), DIGITS)


def level_of(outcome: str) -> Level:
    """Return the level of an outcome of an identification."""
    return LEVELS.get(outcome, "unknown")


def level_of_candidate(similarity: float, review: float, best: Level) -> Level:
    """Return the level of a candidate after the best one. It never passes for a match, nor above the ``best``."""
    return "maybe" if similarity >= review and best != "unknown" else "unknown"


def to_client(similarity: float, accept: float, review: float, level: Level) -> float:
    """Return the similarity on the client's scale, in [0, 1].

    Within a level it increases linearly with the cosine ``similarity``. The order of the levels is that of the
    thresholds ``accept`` and ``review``, so that the whole map is monotonic.
    """
    if level == "known":
        (low, high), (start, end) = (accept, 1.0), (KNOWN, 1.0)
    elif level == "maybe":
        (low, high), (start, end) = (review, min(accept, 1.0)), (UNKNOWN, MAYBE - STEP)
    else:
        (low, high), (start, end) = (-1.0, min(review, 1.0)), (0.0, UNKNOWN - STEP)
    share = 0.0 if high <= low else min(1.0, max(0.0, (similarity - low) / (high - low)))
    return round(start + share * (end - start), DIGITS)
