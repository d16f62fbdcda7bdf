"""Unicode rules of ids and names, the same for every entry: bodies, paths, queries, archives, imports, command line.

The refused characters are listed here. Python's tables would give answers that depend on its version:
``str.isprintable`` is false for emoji that are newer than the interpreter.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

CONTROL_CHARACTERS: Final = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Regular expression class of characters that control a terminal, break a line, or reverse the text around them.

Unicode categories Cc, Zl and Zp, and the bidirectional embeddings, overrides and isolates. Joiners and combining marks
are not included, because names need them."""
MAX_ID_LENGTH: Final = 128
MAX_DEPTH: Final = 100
"""Depth of a value of metadata. Some JSON writers stop at 250."""
MAX_COMBINING_MARKS: Final = 30
"""Maximum run of combining marks, as in the Stream-Safe Text Format (UAX 15). Normalization is quadratic in it."""
_FORBIDDEN: Final = rf"{CONTROL_CHARACTERS}\ud800-\udfff"
_INVISIBLE: Final = (
    _FORBIDDEN
    + r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2060-\u206f\u2800"
    + r"\u3164\ufeff\uffa0\ufff9-\ufffb"
    + r"\xa0\u1680\u2000-\u200a\u202f\u205f"
)
FORBIDDEN_PATTERN: Final = re.compile(f"[{_FORBIDDEN}]")
"""Control characters, line separators, bidirectional controls and surrogates."""
FORBIDDEN_IN_IDS_PATTERN: Final = re.compile(rf"[{_INVISIBLE}\ufffd/\\]")
"""Characters that ids cannot have. Names may have those that are not in FORBIDDEN_PATTERN.

Invisible characters, and spaces other than the usual and the ideographic one, make two ids look equal. U+FFFD stands
for bytes that a client could not decode, so that two people would get one id. Joiners, variation selectors and tags are
allowed, because names and emoji need them."""
_PLAIN_ID: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_ID_LENGTH}}}")
"""Most ids: thousands of an import need no other check."""
ID_RULE: Final = (
    f"must be 1 to {MAX_ID_LENGTH} visible characters, without '/', '\\', U+FFFD and spaces at its ends, "
    "and not '.' or '..'"
)
TEXT_RULE: Final = "must not contain control characters, line separators or direction marks"
MARKS_RULE: Final = f"must not contain more than {MAX_COMBINING_MARKS} combining marks in a row"


def to_nfc(text: str) -> str:
    """Return ``text`` in Unicode normalization form C: the same name in equal bytes, however it was typed or stored.

    Raises:
        ValueError: more than MAX_COMBINING_MARKS marks follow each other.
    """
    if text.isascii():
        return text
    run = 0
    for character in text:
        run = run + 1 if unicodedata.category(character).startswith("M") else 0
        if run > MAX_COMBINING_MARKS:
            raise ValueError(MARKS_RULE)
    return unicodedata.normalize("NFC", text)


def normalize_text(text: str) -> str:
    """Return a name, label or tag in NFC. Raises ValueError: a character is forbidden."""
    normalized = to_nfc(text)
    if FORBIDDEN_PATTERN.search(normalized):
        raise ValueError(TEXT_RULE)
    return normalized


def normalize_id(text: str) -> str:
    """Return an id in NFC. Raises ValueError: it does not follow ID_RULE."""
    if _PLAIN_ID.fullmatch(text):
        return text
    normalized = to_nfc(text)
    if (
        not 0 < len(normalized) <= MAX_ID_LENGTH
        or FORBIDDEN_IN_IDS_PATTERN.search(normalized)
        or normalized != normalized.strip()
        or normalized in (".", "..")
        or not any(is_visible(character) for character in normalized)
    ):
        raise ValueError(ID_RULE)
    return normalized


def is_visible(character: str) -> bool:
    """Return False for marks, format characters such as joiners and tags, and spaces. Unassigned ones may be emoji."""
    return unicodedata.category(character) not in ("Cf", "Mn", "Me", "Zs")


def normalize_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with keys as :func:`normalize_text` returns them, and the texts of its JSON values in NFC.

    Raises:
        ValueError: a text or key is not allowed, two keys are equal in NFC, or a value is nested too deeply.
    """
    return _unique({normalize_text(key): _json_to_nfc(value, MAX_DEPTH) for key, value in metadata.items()}, metadata)


def _json_to_nfc(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return to_nfc(value)
    if isinstance(value, list | dict) and not depth:
        raise ValueError(f"must not be nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_json_to_nfc(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return _unique({to_nfc(key): _json_to_nfc(item, depth - 1) for key, item in value.items()}, value)
    return value


def _unique(normalized: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if len(normalized) < len(given):
        raise ValueError("must not contain two keys that differ in Unicode normalization only")
    return normalized
