"""Base64 text of photos, in the forms that clients send. Pure functions."""

from __future__ import annotations

import binascii
import codecs
import json
import re
from typing import Final
from urllib.parse import unquote_to_bytes

CHUNK_BYTES: Final = 1 << 20
"""Base64 characters per call, a multiple of 4: decoding holds the GIL, and other threads wait."""
LINES_BYTES: Final = 1 << 17
"""Characters of a text with line breaks per call, which is slower."""
FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
LINE_SPACES: Final = b"\t\n\v\f\r"
INDENTED_LINE: Final = re.compile(rb" *[\r\n]+ *")
MAX_HEADER_BYTES: Final = 1000
"""Length of a data URL's media type with parameters."""
NOT_BASE64: Final = "the photo is not base64"


def decode_base64(text: bytes | bytearray) -> bytes:
    """Decode base64 in the standard or the URL-safe alphabet (RFC 4648), with or without padding and line breaks.

    A data URL (RFC 2397), such as ``data:image/jpeg;base64,...``, is accepted, and a byte order mark before either.

    Raises:
        ValueError: The text is not base64, or ambiguous. The message says what to do.
    """
    try:
        return _decode(text)
    except binascii.Error:
        text = _plain(text)
    if len(text.rstrip(b"=")) % 4 == 1 or (text.endswith(b"=") and len(text) % 4):
        raise ValueError(f"{NOT_BASE64}: its length is impossible. Check that it is complete")
    try:
        return _decode(text)
    except binascii.Error as error:
        raise ValueError(f"{NOT_BASE64}: it has other characters, or ends early. Encode the file again") from error


def _decode(text: bytes | bytearray) -> bytes:
    """Decode base64 in the standard alphabet, with or without padding. Raises binascii.Error."""
    padding = next((count for count in (2, 1) if text.endswith(count * b"=")), 0)
    end = len(text) - padding
    if (padding and len(text) % 4) or text.find(b"=", 0, end) >= 0:
        raise binascii.Error("the padding is wrong")
    photo = bytearray()
    for start in range(0, end, CHUNK_BYTES):
        chunk = text[start : min(start + CHUNK_BYTES, end)]
        photo += binascii.a2b_base64(chunk + b"=" * (-len(chunk) % 4), strict_mode=True)
    return bytes(photo)


def _plain(text: bytes | bytearray) -> bytes | bytearray:
    """Return the text in the standard alphabet, without a data URL's header and without line breaks."""
    text = text.removeprefix(codecs.BOM_UTF8)
    head = bytes(text[:16]).lstrip().lower()
    if head.startswith((b"http://", b"https://")):
        raise ValueError("the photo is a URL: send it in 'urls', or send the content of the photo in base64")
    if head.startswith(b"data:"):
        text = _content_of_data_url(text)
    text = text.strip()
    if any(space in text for space in LINE_SPACES):
        text = _without_lines(text)
    if b" " in text:
        raise ValueError(f"{NOT_BASE64}: it has spaces. Encode it again, or escape '+' as %2B where it passes a form")
    if b"-" in text or b"_" in text:
        if b"+" in text or b"/" in text:
            raise ValueError(f"{NOT_BASE64}: it mixes the standard and the URL-safe alphabet. Use one of them")
        return text.translate(FROM_URL_SAFE)
    return text


def _without_lines(text: bytes | bytearray) -> bytearray:
    """Return the text without line breaks and indentation, a piece at a time: a replacement holds the GIL."""
    plain, at = bytearray(), 0
    while at < len(text):
        end = text.find(b"\n", at + LINES_BYTES) + 1 or len(text)
        piece = bytes(text[at:end])
        if b" " in piece:
            piece = INDENTED_LINE.sub(b"", piece).lstrip(b" ") if at else INDENTED_LINE.sub(b"", piece)
        plain += piece.translate(None, LINE_SPACES)
        at = end
    return plain


def unescape(text: bytes | bytearray) -> bytes:
    """Return a JSON string without its escapes, a piece at a time. Raises ValueError."""
    plain, at = bytearray(), 0
    while at < len(text):
        end = min(at + CHUNK_BYTES, len(text))
        if end < len(text) and (escape := text.rfind(b"\\", end - 5, end)) > at:
            end = escape
        plain += json.loads(b'"' + text[at:end] + b'"').encode("utf-8", "replace")
        at = end
    return bytes(plain)


def _content_of_data_url(text: bytes | bytearray) -> bytes | bytearray:
    # Parameters may follow, and parameters before may have commas, as in a file's name.
    marker = bytes(text[:MAX_HEADER_BYTES]).lower().find(b";base64")
    head, comma, content = text[max(0, marker) :].partition(b",")
    if marker < 0 or not comma or not re.fullmatch(rb";base64\s*(;.*)?", head, re.IGNORECASE | re.DOTALL):
        raise ValueError("the data URL is not base64: write data:image/jpeg;base64, and the photo in base64")
    return unquote_to_bytes(bytes(content)) if b"%" in content else content
