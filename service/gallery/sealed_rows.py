"""How a person lies in SQL: sealed by the gallery's key, and found by keyed hashes. Pure.

Whatever does not open raises SealBrokenError, which Database makes a StorageDamagedError of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.gallery.subjects import Crop
from service.security.sealing import Seal, SealBrokenError

SUBJECT: Final = "subject"
CROP: Final = "crop"
ANSWER: Final = "answer"
ITEM: Final = "job item"
PROBLEM: Final = "job problem"
LABEL: Final = "label"
DISAGREEMENT: Final = "disagreement"
PLACE: Final = "place"
"""In a list: where its next page begins."""
REQUEST: Final = "idempotency key"
DIGEST: Final = "request digest"


@dataclass(frozen=True)
class About:
    """What is known of a subject besides faces."""

    id: str
    name: str | None
    metadata: dict[str, Any]
    tags: list[str]


def lookup_of(seal: Seal, subject_id: str) -> str:
    """What stands for a subject's id wherever one is looked for: its row, erasures, the audit."""
    return seal.pseudonym(SUBJECT, subject_id)


def close_about(seal: Seal, about: About) -> bytes:
    return seal.close_json(vars(about), SUBJECT)


def open_about(seal: Seal, sealed: bytes) -> About:
    """Raises SealBrokenError."""
    return About(**seal.open_json(sealed, SUBJECT))


def close_crop(seal: Seal, crop: Crop) -> bytes:
    """Landmarks in a line of their own, then the image."""
    return seal.close(json.dumps(crop.landmarks_xy).encode() + b"\n" + crop.image, CROP)


def open_crop(seal: Seal, sealed: bytes) -> Crop:
    """Raises SealBrokenError."""
    landmarks, _, image = seal.open(sealed, CROP).partition(b"\n")
    return Crop(image, json.loads(landmarks))


def close_disagreement(seal: Seal, outcomes: Sequence[str], similarities: Sequence[float | None]) -> str:
    """What two recognisers answered to one face, for a JSON column."""
    return seal.close_json([outcomes, similarities], DISAGREEMENT).hex()


def open_disagreement(seal: Seal, sealed: str) -> tuple[list[str], list[float | None]]:
    """Two outcomes, and two similarities from -1 to 1. Raises SealBrokenError."""
    try:
        payload = bytes.fromhex(sealed)
    except ValueError as error:
        raise SealBrokenError("a disagreement is no sealed value") from error
    outcomes, similarities = seal.open_json(payload, DISAGREEMENT)
    return outcomes, similarities


def close_place(seal: Seal, *key: int) -> str:
    """A row's key, or what else a list is in the order of, for those who page through it: it tells them nothing, as
    keys count through all galleries."""
    return seal.close(",".join(map(str, key)).encode(), PLACE).hex()


def open_place(seal: Seal, text: str) -> tuple[int, ...]:
    """Raises ValueError, SealBrokenError."""
    return tuple(map(int, seal.open(bytes.fromhex(text), PLACE).split(b",")))
