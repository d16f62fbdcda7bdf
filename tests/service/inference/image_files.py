"""Photos, decoded as a server does it, and malicious ones: small files that take long, use much memory, or lie."""

from __future__ import annotations

import atexit
import io
import struct
import zlib
from functools import cache
from typing import Any, Final

import numpy as np
import pillow_heif
from numpy.typing import NDArray
from PIL import Image

from service.inference.images import ImageLimits, PhotoDecoder, PhotoHeader

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Formats that Pillow writes. HEIC has its own encoder."""


@cache
def decoder(limits: ImageLimits) -> PhotoDecoder:
    opened = PhotoDecoder(limits)
    atexit.register(opened.close)
    return opened


def read_header(payload: bytes, limits: ImageLimits) -> PhotoHeader:
    return decoder(limits).read_header(payload)


def decode(payload: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """Return the full photo, upright, (H, W, 3) uint8 RGB."""
    return decoder(limits).decode(payload)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


SMALL = Image.fromarray((np.indices((64, 48)).sum(0) * 2).astype(np.uint8)).convert("RGB")
JPEG = encode(SMALL, "JPEG")


QUICK = {"preset": "ultrafast", "x265:pools": "none", "x265:frame-threads": "1", "x265:wpp": "0"}


def heic(image: Image.Image, **options: Any) -> bytes:
    """Encode as HEIC, nearly lossless. ``options``: of pillow-heif, such as quality, exif, save_all."""
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, **{"quality": -1, "chroma": 444, "enc_params": QUICK, **options})
    return buffer.getvalue()


def heic_claiming(width: int, height: int, payload: bytes) -> bytes:
    """Change the image size in the header only."""
    at = payload.index(b"ispe") + 8
    return payload[:at] + struct.pack(">II", width, height) + payload[at + 8 :]


HEIC = heic(SMALL)


def stored(upright: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Store the photo as a camera with this EXIF orientation does."""
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    return np.ascontiguousarray(turned)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def oriented(upright: NDArray[np.uint8], orientation: int, kind: str = "JPEG", **options: object) -> bytes:
    return encode(Image.fromarray(stored(upright, orientation)), kind, exif=exif_of(orientation), **options)


def png(width: int, height: int, extra: bytes = b"", color: int = 2, rows: bytes | None = None) -> bytes:
    """Black PNG. ``extra``: additional chunks. ``color``: 2 RGB, 3 palette, 6 RGBA."""
    if rows is None:
        rows = zlib.compress(bytes((width * {2: 3, 3: 1, 6: 4}[color] + 1) * height), 1)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed_chunk(kind: bytes, size: int) -> bytes:
    """Compressed chunk that decompresses to ``size`` bytes."""
    return chunk(kind, b"k\0\0" + zlib.compress(bytes(size), 9))


def scans(width: int, height: int, count: int) -> bytes:
    """A gray progressive JPEG of ``count`` scans. Each scan states in a few bytes that no coefficient changes."""
    blocks = -(-width // 8) * -(-height // 8)
    frame = struct.pack(">HBHHB", 11, 8, height, width, 1) + bytes([1, 0x11, 0])
    one_code = bytes([1] + [0] * 15)
    # AC symbol E0: a run of 2^14 blocks, plus 14 bits.
    tables = [(0x00, 0x00), (0x10, 0xE0)]
    head = b"\xff\xd8\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64) + b"\xff\xc2" + frame
    head += b"".join(b"\xff\xc4" + struct.pack(">HB", 20, kind) + one_code + bytes([code]) for kind, code in tables)
    first = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, 0, 0, 0]) + bytes(-(-blocks // 8))
    bits = ("0" + "1" * 14) * -(-blocks // 32767)
    bits += "1" * (-len(bits) % 8)
    run = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return head + first + (b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, 1, 63, 0]) + run) * count + b"\xff\xd9"


def with_exif(tiff: bytes) -> bytes:
    body = b"Exif\0\0" + tiff
    return JPEG[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + JPEG[2:]


def ifd(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A little-endian TIFF header and one directory of (tag, type, count, value)."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + body + struct.pack("<I", following)


def tiff_of(jpeg: bytes, width: int, height: int) -> bytes:
    """A gray TIFF with one strip."""
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 7), (262, 3, 1, 1)]
    at = 8 + 2 + 9 * 12 + 4
    return ifd(*entries, (273, 4, 1, at), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, len(jpeg))) + jpeg


def gif(width: int = 8, height: int = 8, screen: tuple[int, int] = (8, 8)) -> bytes:
    whole = encode(Image.new("P", (width, height)), "GIF")
    return whole[:6] + struct.pack("<HH", *screen) + whole[10:]


def bmp(width: int, height: int, bits: int, compression: int, body: bytes, colors: int = 256) -> bytes:
    palette = bytes(1024)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(body), 0, 0, colors, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(body), 0, 0, 54 + 1024) + info + palette + body


def harmful() -> dict[str, bytes]:
    """Return the malicious images by description."""
    large = heic(Image.new("L", (2000, 2000)))
    return {
        "jpeg, 20,000 scans": scans(4000, 3000, 20_000),
        "jpeg, scans behind a marker of no meaning": _behind(scans(4000, 3000, 20_000)),
        "jpeg, 20 MB of escapes": encode(Image.new("RGB", (64, 64)), "JPEG")[:-2] + b"\xff\0" * 9_000_000,
        "jpeg, 20 MB of fill bytes": encode(Image.new("RGB", (64, 64)), "JPEG")[:-2] + b"\xff" * 19_000_000,
        "jpeg, 200,000 markers": JPEG[:2] + b"\xff\xe5\x00\x02" * 200_000 + JPEG[2:],
        "jpeg, 7000 pixels of which none is there": encode(Image.new("RGB", (7000, 7000)), "JPEG")[:2000],
        "jpeg, exif in a loop": with_exif(ifd((0x8769, 4, 1, 8), following=8)),
        "jpeg, exif of 2 billion values": with_exif(ifd((0x112, 3, 0x7FFFFFFF, 8), (0x100, 4, 0xFFFFFFFF, 0))),
        "jpeg, orientation of no number": with_exif(ifd((0x112, 12, 1, 0))),
        "jpeg, exif of 5000 entries": with_exif(ifd(*[(0x9999, 7, 5000, 0)] * 5000))[:60_000],
        "png, 50 megapixels": png(7071, 7071),
        "png, nothing": png(0, 0),
        "png, text of 200 MB": png(8, 8, packed_chunk(b"zTXt", 200_000_000)),
        "png, 900 texts": png(8, 8, packed_chunk(b"zTXt", 1_000_000) * 900),
        "png, profile of 200 MB": png(8, 8, packed_chunk(b"iCCP", 200_000_000)),
        "png, 900 profiles": png(8, 8, packed_chunk(b"iCCP", 1_000_000) * 900),
        "png, 60,000 small texts": png(8, 8, chunk(b"tEXt", b"k\0v") * 60_000),
        "png, colors that are not in its palette": png(
            64, 64, chunk(b"PLTE", b"abc"), 3, zlib.compress(bytes(range(65)) * 64)
        ),
        "png, no palette": png(64, 64, b"", 3, zlib.compress(bytes(range(65)) * 64)),
        "gif, 4 gigapixels": gif(screen=(65_535, 65_535)),
        "gif, frame beyond its screen": gif(4000, 4000),
        "gif and script": b"GIF89a/*" + b"x" * 100 + b"*/=1;alert(1)",
        "tiff, 20,000 scans": tiff_of(scans(4000, 3000, 20_000), 4000, 3000),
        "tiff, 50 megapixels in a kilobyte": encode(Image.new("1", (7000, 7000)), "TIFF", compression="group4"),
        "webp, 50 megapixels": encode(Image.new("RGB", (7000, 7000)), "WEBP", lossless=True, method=0, quality=0),
        "avif, 36 megapixels": encode(Image.new("L", (6000, 6000)), "AVIF", speed=10, quality=1),
        "heic, 36 megapixels": heic_grid(2, 2, 6000, 6000, large, 2000),
        "heic, 4 megapixels said to be few": heic_claiming(64, 64, large),
        "heic, few pixels said to be 49 million": heic_claiming(7000, 7000, HEIC),
        "heic, 4 exapixels": heic_claiming(0xFFFFFFFF, 0xFFFFFFFF, HEIC),
        "heic, a grid of a gigapixel": heic_grid(30, 30, 32_767, 32_767),
        "heic, a grid of 65,280 tiles": heic_grid(254, 255, 64, 64),
        "heic, a grid of large tiles": heic_grid(8, 8, 6000, 6000, large, 2000),
        "bmp, runs that go on": bmp(7000, 7000, 8, 1, b"\x01\0" * 400_000),
        "bmp, 4 exapixels": bmp(0x7FFFFFFF, -0x80000000, 24, 0, b""),
        "pdf and jpeg": b"%PDF-1.4\n" + JPEG,
    }


def heic_grid(rows: int, columns: int, width: int, height: int, tile: bytes | None = None, side: int = 64) -> bytes:
    """A grid whose tiles, each a HEIC of ``side`` pixels, all share the same bytes. ``rows`` and ``columns`` are one
    less than the counts, for at most 65,534 tiles.
    """
    photo = heic(SMALL.resize((side, side))) if tile is None else tile
    at = photo.index(b"hvcC") - 4
    hvcc, coded = photo[at : at + int.from_bytes(photo[at : at + 4])], photo[photo.index(b"mdat") + 4 :]
    config = bytes([0, 1, rows, columns]) + struct.pack(">II", width, height)
    count = (rows + 1) * (columns + 1)
    tiles = range(2, count + 2)

    def ispe(w: int, h: int) -> bytes:
        return box(b"ispe", struct.pack(">II", w, h), 0)

    def infe(item: int, kind: bytes) -> bytes:
        return box(b"infe", struct.pack(">HH", item, 0) + kind + b"\0", 2)

    properties = box(b"ipco", ispe(width, height) + ispe(side, side) + hvcc)
    associations = struct.pack(">I", 1 + count) + b"\0\1\1\1"
    associations += b"".join(struct.pack(">HBBB", item, 2, 2, 0x83) for item in tiles)
    infes = infe(1, b"grid") + b"".join(infe(item, b"hvc1") for item in tiles)

    def meta(at: int) -> bytes:
        places = b"\x44\0" + struct.pack(">HHHHHII", 1 + count, 1, 1, 0, 1, 0, len(config))
        places += b"".join(struct.pack(">HHHHII", item, 0, 0, 1, at, len(coded)) for item in tiles)
        inner = box(b"hdlr", bytes(4) + b"pict" + bytes(13), 0) + box(b"pitm", b"\0\1", 0)
        inner += box(b"iinf", struct.pack(">H", 1 + count) + infes, 0)
        inner += box(b"iref", box(b"dimg", struct.pack(f">HH{count}H", 1, count, *tiles)), 0)
        inner += box(b"iprp", properties + box(b"ipma", associations, 0))
        return box(b"meta", inner + box(b"idat", config) + box(b"iloc", places, 1), 0)

    head = box(b"ftyp", b"heic" + bytes(4) + b"mif1heic")
    return head + meta(len(head) + len(meta(0)) + 8) + box(b"mdat", coded)


def box(kind: bytes, body: bytes, version: int | None = None) -> bytes:
    full = b"" if version is None else bytes([version, 0, 0, 0])
    return struct.pack(">I", 8 + len(full) + len(body)) + kind + full + body


def _behind(jpeg: bytes) -> bytes:
    """All but the first scan begin where a reader that gave the marker before them a length would not look."""
    second = jpeg.index(b"\xff\xda", jpeg.index(b"\xff\xda") + 2)
    return jpeg[:second] + b"\xff\xbf\xff\xff" + jpeg[second:]
