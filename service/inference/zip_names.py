"""Names in zip archives whose writers did not set the flag for UTF-8. Pure."""

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
ENTRY: Final = struct.Struct("<8xH18xHHH12x")
"""Entry of a directory without its variable part: flags, and sizes of name, extra field and comment."""
FLAGS_OFFSET: Final = 8
FLAGS: Final = struct.Struct("<H")
EXTRA_OFFSET: Final = 30
EXTRA_AND_COMMENT: Final = struct.Struct("<HH")
"""Sizes of extra field and comment."""
FIELD: Final = struct.Struct("<HH")
PATH_HEADER: Final = struct.Struct("<BL")


def name_of(info: zipfile.ZipInfo) -> str:
    """Return the name of an entry, from the Unicode extra field or as UTF-8.

    Bytes that are not UTF-8 become surrogates, as in tar archives: the code page of the writer is unknown. Some writers
    separate folders by backslashes.
    """
    return _decode_name(info).replace("\\", "/")


def _decode_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & UTF8_FLAG:
        return info.filename
    stored = info.orig_filename.encode("cp437")  # the reverse of zipfile's decoding
    unicode_path = _unicode_path(info.extra, stored)
    name = (stored if unicode_path is None else unicode_path).partition(b"\0")[0]
    return name.decode("utf-8", "surrogateescape")


def repair_directory(directory: bytes) -> bytes:
    """Return the directory of a zip without faults of single entries for which ``zipfile`` rejects the whole archive.

    The flag for UTF-8 is cleared where a name is not UTF-8. Extra fields that do not add up become a comment.
    """
    fixed, at = bytearray(directory), 0
    while at + ENTRY.size <= len(fixed) and fixed.startswith(ENTRY_SIGNATURE, at):
        flags, name_size, extra_size, comment_size = ENTRY.unpack_from(fixed, at)
        name_at = at + ENTRY.size
        extra_at = name_at + name_size
        if flags & UTF8_FLAG and not _is_utf8(bytes(fixed[name_at:extra_at])):
            FLAGS.pack_into(fixed, at + FLAGS_OFFSET, flags & ~UTF8_FLAG)
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


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unicode_path(extra: bytes, stored: bytes) -> bytes | None:
    """Return the name in the Unicode extra field; None if it is missing or belongs to an earlier name."""
    at = 0
    while at + FIELD.size <= len(extra):
        kind, size = FIELD.unpack_from(extra, at)
        content = extra[at + FIELD.size : at + FIELD.size + size]
        if kind == UNICODE_PATH and len(content) > PATH_HEADER.size:
            version, checksum = PATH_HEADER.unpack_from(content)
            if version == 1 and checksum == zlib.crc32(stored):
                return content[PATH_HEADER.size :]
        at += FIELD.size + size
    return None
