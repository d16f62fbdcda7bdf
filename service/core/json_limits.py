"""Limit on the number of values of a JSON document, checked before parsing."""

from __future__ import annotations

from typing import Final

MAX_VALUES: Final = 10_000
"""Values besides the numbers of embeddings. This many are read in 20 ms."""


def check_json(document: bytes, numbers: int = 0) -> None:
    """Raise ValueError if the document may have more than so many values, and ``numbers`` of embeddings.

    A parser makes an object of each value, so that a few megabytes of `[]` need gigabytes. The count includes the
    commas and brackets of text; base64 has none.
    """
    if sum(map(document.count, (b",", b"[", b"{"))) > MAX_VALUES + numbers:
        raise ValueError(f"more than {MAX_VALUES} values")
