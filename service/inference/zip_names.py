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
FIELD: Final = struct.Struct("<HH")
PATH_HEADER: Final = struct.Struct("<BL")


def name_of(info: zipfile.ZipInfo) -> str:
    """Return the name of an entry, from the Unicode extra field or as UTF-8.

    Bytes that are not UTF-8 become surrogates, as in tar archives: the code page of the writer is unknown.
    """
    if info.flag_bits & UTF8_FLAG:
        return info.filename
    stored = info.orig_filename.encode("cp437")  # the reverse of zipfile's decoding
    unicode_path = _unicode_path(info.extra, stored)
    name = (stored if unicode_path is None else unicode_path).partition(b"\0")[0]
    return name.decode("utf-8", "surrogateescape")


def clear_false_flags(directory: bytes) -> bytes:
    """Return the directory of a zip without the flag for UTF-8 where a name is not UTF-8.

    ``zipfile`` rejects the whole archive otherwise.
    """
    fixed, at = bytearray(directory), 0
    while at + ENTRY.size <= len(fixed) and fixed.startswith(ENTRY_SIGNATURE, at):
        flags, *sizes = ENTRY.unpack_from(fixed, at)
        name = bytes(fixed[at + ENTRY.size : at + ENTRY.size + sizes[0]])
        if flags & UTF8_FLAG and not _is_utf8(name):
            FLAGS.pack_into(fixed, at + FLAGS_OFFSET, flags & ~UTF8_FLAG)
        at += ENTRY.size + sum(sizes)
    return bytes(fixed)


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
