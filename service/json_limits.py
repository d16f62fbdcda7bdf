"""Limits on the shape of a JSON document, checked before a parser sees it. Pure.

A parser makes a Python object of each value: a few megabytes of ``[]`` become gigabytes. The scanner counts brackets,
quotes and commas, and makes no object per value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_VALUES: Final = 20_000
"""Strings, containers, or other values, not counting the numbers of embeddings: parsed in less than 20 ms."""
MAX_DEPTH: Final = 100
REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
OPENING: Final = frozenset(b"[{")
NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class JsonLimits:
    """``values``: most strings, most containers, and most commas; ``numbers``: further commas, for embeddings."""

    values: int = MAX_VALUES
    numbers: int = 0


DEFAULT_LIMITS: Final = JsonLimits()


def check_json(document: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> None:
    """Raises ValueError: the document has too many values, or is nested too deeply."""
    for _ in JsonScanner(limits).runs(document):
        pass


class JsonScanner:
    """Scanner of one document that arrives in pieces. Malformed documents pass: the parser rejects them."""

    def __init__(self, limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._in_string = False
        self._backslash = b""
        self._strings = self._containers = self._commas = self._depth = 0

    def runs(self, piece: bytes) -> Iterator[tuple[bool, bytes]]:
        """Split a piece into (in a string, bytes). Quotes are outside of strings; a string may have several runs.

        Raises:
            ValueError: as check_json.
        """
        piece, self._backslash = self._backslash + piece, b""
        at = 0
        while at < len(piece):
            if self._in_string:
                end = _end_of_string(piece, at)
                yield True, piece[at:end]
                if end < len(piece) and piece[end] == ord("\\"):  # the character that it escapes has not arrived yet
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
        most = self._limits.values
        self._strings += opens_string
        self._containers += run.count(b"[") + run.count(b"{")
        self._commas += run.count(b",")
        if max(self._strings, self._containers, self._commas - self._limits.numbers) > most:
            raise ValueError(f"more than {most} values")
        for bracket in run.translate(None, NOT_BRACKETS):
            self._depth += 1 if bracket in OPENING else -1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} deep")
            if self._depth < 0:
                raise ValueError("a bracket closes nothing")


def _end_of_string(piece: bytes, start: int) -> int:
    """Index of the closing quote, of a backslash that ends the piece, or of the end."""
    quote = piece.find(b'"', start)
    end = len(piece) if quote < 0 else quote
    if piece.find(b"\\", start, end) < 0:
        return end
    found = REST_OF_STRING.match(piece, start)
    return end if found is None else found.end()
