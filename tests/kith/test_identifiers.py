"""Unicode rules of ids and names: one answer for each text, whatever the version of Python's tables."""

from __future__ import annotations

import time
import unicodedata

import pytest

from kith.wire.identifiers import normalize_id, normalize_metadata, normalize_text
from service.domain.person_search import matches, words_of

NFC, NFD = "Jos\xe9", "Jose\u0301"
ALLOWED_IN_IDS = [
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # ZERO WIDTH NON-JOINER
    "කර්\u200dම",  # ZERO WIDTH JOINER
    "കൃഷ്ണന്\u200d",
    "👩\u200d💻",
    "❤\ufe0f",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # flag of Scotland, written with tags
    "\U0001fae9",  # emoji of Unicode 16, unassigned in the tables of Python 3.13
    "\U0001fac8",  # reserved for emoji, not assigned in Unicode 16
    "\ue000",  # private use, for rare Chinese characters
    "山田\u3000太郎",
    "ada lovelace",
    "...",
    "\xe5" * 128,
    *("🕵\ufe0f\u200d♀\ufe0f", "👨🏽\u200d🚀", "1\ufe0f\u20e3", "©\ufe0f", "㊗\ufe0f", "🏳\ufe0f\u200d🌈"),
    *("\u0639\u0644\u06cc\u200c\u0631\u0636\u0627", "क्\u200dष", "क्\u200cष"),
]
ALSO_ALLOWED_IN_NAMES = ["\u200f\u05d0\u05d3\u05d4", "a\xa0b", "Ren\ufffd", "a/b", ".", "", " ada "]
OVERRIDES = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Bidirectional classes of characters that turn the text after them around."""
FORBIDDEN_IN_IDS = [
    *("", " ", " ada", "ada ", "ada\u3000", ".", "..", "a/b", "a\\b", "a" * 129),
    *("\u200d", "\ufe0f", "\U000e0067", "\u2800", "\u180e", "Ann\u034f", "Ann\u17b5", "\u200d\ufe0f"),
    *("a\u200bb", "a\ufeffb", "\ufeffada", "a\xadb", "a\u2060b", "a\u200eb", "a\xa0b", "a\u2009b", "\u3164"),
    "Ren\ufffd",
]


def test_a_search_of_people_folds_joiners() -> None:
    for typed in ("ada", "a\u200dda", "ada\ufe0f", "ada\U000e0061", "a\u200cd\U000e0100a"):
        assert matches(words_of(typed), "Ada Lovelace", None)
        assert matches(words_of("ada"), "x", typed)


def test_letters_joiners_and_emoji_are_allowed_and_controls_forbidden() -> None:
    for text in ALLOWED_IN_IDS:
        assert normalize_id(text) == normalize_text(text) == text
    for text in ALSO_ALLOWED_IN_NAMES:
        assert normalize_text(text) == text
    for forbid in (normalize_id, normalize_text, lambda text: normalize_metadata({text: 1})):
        with pytest.raises(ValueError, match="must"):
            forbid("a\u202eb")


@pytest.mark.parametrize("text", FORBIDDEN_IN_IDS)
def test_ids_that_look_like_others_are_forbidden(text: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 128 visible characters"):
        normalize_id(text)


def test_no_printable_letter_is_forbidden() -> None:
    """The listed characters agree with the properties of this Python's tables."""
    for character in map(chr, range(0x110000)):
        category = unicodedata.category(character)
        is_bidirectional = unicodedata.bidirectional(character) in OVERRIDES
        forbidden = category in ("Cc", "Cs", "Zl", "Zp") or is_bidirectional
        try:
            normalize_text(character)
        except ValueError:
            assert forbidden, hex(ord(character))
        else:
            assert not forbidden, hex(ord(character))


@pytest.mark.parametrize(
    ("given", "expected"),
    [(NFD, NFC), ("\u1112\u1161\u11ab", "한"), ("\u212bngstr\xf6m", "\xc5ngström"), ("e\u0301" * 128, "\xe9" * 128)],
)
def test_canonically_equal_ids_become_one(given: str, expected: str) -> None:
    assert normalize_id(given) == normalize_text(given) == expected


def test_metadata_is_normalized_at_every_depth() -> None:
    given = {NFD: {NFD: [NFD, 1, None, {"k": NFD}]}, "text": "a\nb\u202e"}
    assert normalize_metadata(given) == {NFC: {NFC: [NFC, 1, None, {"k": NFC}]}, "text": "a\nb\u202e"}
    for ambiguous in ({NFC: 1, NFD: 2}, {"k": {NFC: 1, NFD: 2}}):
        with pytest.raises(ValueError, match="two keys"):
            normalize_metadata(ambiguous)


@pytest.mark.parametrize("marks", ["\u0301", "\u0300\u0316", "\u0f73", "\u0344\u0316"])
def test_work_is_bounded(marks: str) -> None:
    """Normalization sorts combining marks in quadratic time: 100,000 of them would take a minute."""
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="30 combining marks"):
        normalize_text(marks * 100_000)
    assert time.monotonic() - start_s < 5
