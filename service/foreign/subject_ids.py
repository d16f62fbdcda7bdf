"""Ids that Kith takes, of what others call people."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MOST_LETTERS: Final = 128
UNFIT: Final = re.compile(r"[/\\]")


class SubjectIds:
    """The same id for the same name, and another for another: what Kith's ids cannot hold is replaced, and a number
    keeps apart what would become one."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._ids:
            fit = _fit(name)
            subject, number = fit, 2
            while subject in self._taken:
                end = f"-{number}"
                subject, number = fit[: MOST_LETTERS - len(end)].rstrip() + end, number + 1
            self._ids[name] = subject
            self._taken.add(subject)
        return self._ids[name]

    @property
    def changed(self) -> dict[str, str]:
        """Id by name, where they differ."""
        return {name: subject for name, subject in self._ids.items() if name != subject}


def _fit(name: str) -> str:
    text = UNFIT.sub("-", unicodedata.normalize("NFC", name))
    text = "".join(letter if letter.isprintable() else " " for letter in text).strip()[:MOST_LETTERS].strip()
    return text if text not in ("", ".", "..") else "unnamed"
