"""Limits on the number of values and the depth of a JSON document, checked before parsing.

A parser creates one Python object per value, so a few megabytes of ``[]`` need gigabytes. The scanner counts brackets,
quotes and commas without creating objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_VALUES: Final = 2_000
"""Values, without those of embeddings. This many are read in milliseconds, ten times as many in 0.2 s."""
MAX_DEPTH: Final = 100
STRING_REMAINDER: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
OPENING: Final = frozenset(b"[{")
NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a document: ``values`` limits strings, containers and commas, each.

    Embeddings may add ``numbers`` commas and ``lists`` containers.
    """

    values: int = MAX_VALUES
    numbers: int = 0
    lists: int = 0


DEFAULT_LIMITS: Final = JsonLimits()


def check_json(document: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> None:
    """Raise ValueError if the document has too many values or is nested too deeply."""
    for _ in JsonScanner(limits).runs(document):
        pass


class JsonScanner:
    """Incremental scanner of one document. It accepts malformed documents, which the parser rejects."""

    def __init__(self, limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._in_string = False
        self._backslash = b""
        self._strings = self._containers = self._commas = self._depth = 0

    def runs(self, piece: bytes) -> Iterator[tuple[bool, bytes]]:
        """Yield (inside a string, bytes) runs of a piece. Quotes are outside; one string may have several runs.

        Raises:
            ValueError: As check_json.
        """
        piece, self._backslash = self._backslash + piece, b""
        at = 0
        while at < len(piece):
            if self._in_string:
                end = _end_of_string(piece, at)
                yield True, piece[at:end]
                if end < len(piece) and piece[end] == ord("\\"):  # the escaped character is in the next piece
                    self._backslash = b"\\"
                    return
                if end < len(piece):
                    self._in_string = False
                    yield False, b'"'
                at = end + 1
            else:
                quote = piece.find(b'"', at)
                run = piece[at:] if quote < 0 else piece[at : quote + 1]
                self._count(run, quote >= 0)
                self._in_string = quote >= 0
                yield False, run
                at += len(run)

    def _count(self, run: bytes, opens_string: bool) -> None:
        max_values = self._limits.values
        self._strings += opens_string
        self._containers += run.count(b"[") + run.count(b"{")
        self._commas += run.count(b",")
        containers, commas = self._containers - self._limits.lists, self._commas - self._limits.numbers
        if max(self._strings, containers, commas) > max_values:
            raise ValueError(f"more than {max_values} values")
        for bracket in run.translate(None, NOT_BRACKETS):
            self._depth += 1 if bracket in OPENING else -1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep")
            if self._depth < 0:
                raise ValueError("unbalanced closing bracket")


def _end_of_string(piece: bytes, start: int) -> int:
    """Return the index of the closing quote, of a backslash that ends the piece, or of the piece's end."""
    quote = piece.find(b'"', start)
    end = len(piece) if quote < 0 else quote
    if piece.find(b"\\", start, end) < 0:
        return end
    found = STRING_REMAINDER.match(piece, start)
    return end if found is None else found.end()
