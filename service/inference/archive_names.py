"""Names in archives: as their writers declare them, or in the encoding that the user states. Pure."""

from __future__ import annotations

import re
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable
from typing import Final

UTF8_FLAG: Final = 0x800
DOS_SYSTEM: Final = 0
"""System of writers that store names in the machine's code page if UTF8_FLAG is clear (APPNOTE.TXT 4.4.2)."""
UNICODE_PATH: Final = 0x7075
"""Id of Info-ZIP's extra field with the name in UTF-8 (APPNOTE.TXT 4.6.9)."""
ENTRY_SIGNATURE: Final = b"PK\1\2"
"""Signature of each entry of a zip's directory."""
ENTRY: Final = struct.Struct("<28xHHH12x")
"""Entry of a directory without its variable part: sizes of name, extra field and comment."""
EXTRA_OFFSET: Final = 30
EXTRA_AND_COMMENT: Final = struct.Struct("<HH")
"""Sizes of extra field and comment."""
FIELD: Final = struct.Struct("<HH")
PATH_HEADER: Final = struct.Struct("<BL")
EAST_ASIAN: Final = frozenset(
    ["CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "BOPOMOFO", "FULLWIDTH", "HALFWIDTH"]
)
"""Scripts that a name may mix with each other and with Latin letters: first words of the names of their letters."""
WORD: Final = re.compile("[A-Za-z\x80-\U0010ffff]+")
APOSTROPHES: Final = "\xb7\u02bb\u02bc"
"""Middle dot and modifier letters, as in Catalan, Hawaiian and Ukrainian names."""
MIN_EVIDENT_BYTES: Final = 6
"""Bytes of a word of one alphabet that are hardly UTF-8 by chance."""


def name_of(info: zipfile.ZipInfo, names: str | None) -> tuple[str, bool]:
    """Return the name of an entry, and whether its encoding is certain: flagged, in the Unicode extra field, or ASCII.

    ``names`` is the encoding of the other names. None: they are read as UTF-8. Bytes that are not UTF-8 become
    surrogates then, as in tar archives. Some writers separate folders by backslashes.
    """
    if info.flag_bits & UTF8_FLAG:
        return info.filename.replace("\\", "/"), True
    stored = info.orig_filename.encode(names or "cp437", "replace")  # the reverse of zipfile's decoding
    if (unicode_path := _unicode_path(info.extra, stored)) is not None:
        return unicode_path.decode("utf-8", "surrogateescape").replace("\\", "/"), True
    if names is not None:
        return info.filename.replace("\\", "/"), True
    name = stored.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    if not is_utf8(name):
        return name, False  # a backslash may be half of a character
    if info.create_system == DOS_SYSTEM and not name.isascii():
        return stored.decode("ascii", "surrogateescape"), False
    return name.replace("\\", "/"), name.isascii()


def is_utf8(name: str) -> bool:
    """Return False for a name with surrogates, which stand for bytes that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def doubtful_name(names: Iterable[str]) -> str | None:
    """Return a name that shows that undeclared ``names`` are not UTF-8; None if they are.

    Text of another encoding can be valid UTF-8: two Chinese characters in GBK, for example. Words of several alphabets,
    or that begin with a mark, are no names. Words of accented letters only, and very short ones, are names if another
    word is UTF-8 beyond doubt.
    """
    unclear, evident = None, False
    for name in names:
        if not is_utf8(name):
            return name
        for word in WORD.findall(name):
            foreign = [character for character in word if not character.isascii()]
            scripts = {_script(character) for character in foreign} - {""}
            plain = len(word) - len(foreign)
            inside = word[0] in APOSTROPHES or unicodedata.category(word[0]).startswith("M")
            if len(scripts - EAST_ASIAN) > 1 or (inside and not plain) or (scripts == {"SYMBOL"} and not plain):
                return name
            if (
                scripts & EAST_ASIAN
                or (plain > len(foreign) and scripts == {"LATIN"})
                or (scripts and scripts != {"LATIN"} and len("".join(foreign).encode()) >= MIN_EVIDENT_BYTES)
            ):
                evident = True
            elif scripts and not plain:
                unclear = unclear or name
    return None if evident else unclear


def _script(character: str) -> str:
    """Return the script of a letter, SYMBOL for what is in no name; empty for marks, apostrophes and emoji."""
    category = unicodedata.category(character)
    if category.startswith("M") or character in APOSTROPHES:
        return ""
    if category.startswith("L"):
        return unicodedata.name(character, "SYMBOL").partition(" ")[0]
    return "SYMBOL" if character < "\u0800" or category == "Co" else ""


def repair_directory(directory: bytes) -> bytes:
    """Return the directory of a zip with extra fields that do not add up as comments.

    ``zipfile`` rejects the whole archive for one of them.
    """
    fixed, at = bytearray(directory), 0
    while at + ENTRY.size <= len(fixed) and fixed.startswith(ENTRY_SIGNATURE, at):
        name_size, extra_size, comment_size = ENTRY.unpack_from(fixed, at)
        extra_at = at + ENTRY.size + name_size
        if not _add_up(bytes(fixed[extra_at : extra_at + extra_size])):
            EXTRA_AND_COMMENT.pack_into(fixed, at + EXTRA_OFFSET, 0, min(extra_size + comment_size, 0xFFFF))
        at = extra_at + extra_size + comment_size
    return bytes(fixed)


def _add_up(extra: bytes) -> bool:
    """Return whether the sizes of extra fields lead to the end. Less than a header may follow, as padding."""
    at = 0
    while at + FIELD.size <= len(extra):
        at += FIELD.size + FIELD.unpack_from(extra, at)[1]
    return at <= len(extra)


def _unicode_path(extra: bytes, stored: bytes) -> bytes | None:
    """Return the name in the Unicode extra field; None if it is missing or belongs to an earlier name."""
    at = 0
    while at + FIELD.size <= len(extra):
        kind, size = FIELD.unpack_from(extra, at)
        content = extra[at + FIELD.size : at + FIELD.size + size]
        if kind == UNICODE_PATH and len(content) > PATH_HEADER.size:
            version, checksum = PATH_HEADER.unpack_from(content)
            if version == 1 and checksum == zlib.crc32(stored):
                return content[PATH_HEADER.size :].partition(b"\0")[0]
        at += FIELD.size + size
    return None
