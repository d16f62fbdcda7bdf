"""Limits on the number of values and the depth of a JSON document, checked before parsing.

A parser creates one Python object per value, so a few megabytes of ``[]`` need gigabytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

MAX_VALUES: Final = 2_000
"""Values, without those of embeddings. This many are read in milliseconds, ten times as many in 0.2 s."""
MAX_DEPTH: Final = 100
STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a document: ``values`` limits members with strings, containers, and commas, each.

    Embeddings may add ``numbers`` commas and ``lists`` containers.
    """

    values: int = MAX_VALUES
    numbers: int = 0
    lists: int = 0


DEFAULT_LIMITS: Final = JsonLimits()


def check_json(document: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> None:
    """Raise ValueError if the document has too many values or is nested too deeply."""
    if sum(map(document.count, (b",", b"[", b"{"))) <= MAX_DEPTH:  # photos in base64 have none
        return
    quotes = document.count(b'"') - document.count(b'\\"')  # four of a member
    # Quotes first, because each string that is cut out takes memory.
    outside = STRING.sub(b"", document) if quotes <= 4 * (limits.values + 1) else b""
    containers, commas = outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    if not outside or containers > limits.values + limits.lists or commas > limits.values + limits.numbers:
        raise ValueError(f"more than {limits.values} values")
    brackets = outside.translate(None, NOT_BRACKETS)
    if max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
