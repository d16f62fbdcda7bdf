"""Names in archives: as their writers declare them, or in the encoding that the user states. Pure."""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import Final

UTF8_FLAG: Final = 0x800
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


def name_of(info: zipfile.ZipInfo, names: str | None) -> tuple[str, bool]:
    """Return the name of an entry, and whether its encoding is known: flagged, in the Unicode extra field, or UTF-8.

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
    return name.replace("\\", "/"), True


def is_utf8(name: str) -> bool:
    """Return False for a name with surrogates, which stand for bytes that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


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
