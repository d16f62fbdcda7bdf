"""Search of people by a part of their name or id, without regard to case and accents. Pure."""

from __future__ import annotations

import unicodedata


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a typed text, as :func:`matches` compares them; empty if it has only spaces and marks."""
    return tuple(_plain(text).split())


def matches(words: tuple[str, ...], subject_id: str, name: str | None) -> bool:
    """Return whether each word is part of the id or the name, in any order."""
    told = _plain(f"{subject_id}\n{name or ''}")
    return all(word in told for word in words)


def _plain(text: str) -> str:
    """Return ``text`` without case, accents and joiners: "José", "JOSE" and "jose" are equal.

    Compatibility characters are replaced too, such as full-width letters."""
    if text.isascii():
        return text.casefold()
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(character for character in folded if not _is_folded(character))


def _is_folded(character: str) -> bool:
    """Return whether a character is an accent, or invisible: a joiner, variation selector or tag."""
    return (
        unicodedata.combining(character) != 0
        or unicodedata.category(character) == "Cf"
        or "\ufe00" <= character <= "\ufe0f"
        or "\U000e0100" <= character <= "\U000e01ef"
    )
