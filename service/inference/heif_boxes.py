"""Decoding cost of HEIF and AVIF files in pixels, from their boxes (ISO/IEC 14496-12 and 23008-12). Pure functions.

libheif reports the size after cropping, and decodes all tiles of a grid, so the real cost must be known before. If
properties contradict each other, the largest counts. Files that readers may interpret differently, such as those with
repeated boxes or extents without a length, are rejected.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

TILED: Final = frozenset({b"grid", b"iovl"})
DERIVED: Final = TILED | {b"iden", b"tmap"}
UNIQUE_BOXES: Final = frozenset({b"pitm", b"iinf", b"iref", b"iprp", b"iloc", b"idat"})
"""Boxes that may occur once in the meta box (ISO/IEC 14496-12, 8.11)."""
NUMBER_SIZES: Final = frozenset({0, 4, 8})
"""Valid field sizes of iloc in bytes. libheif skips fields of other sizes without reading them."""
MAX_BOXES: Final = 100_000
MAX_EXTENTS: Final = 16
MAX_DATA_FACTOR: Final = 4
"""Limit of the data of all images, as a multiple of the file."""


@dataclass
class HeifItems:
    """Items of a HEIF file, by item ID.

    Attributes:
        sizes: Pixels of all images that the file declares.
        kinds: Item types, such as hvc1 or grid.
        properties: Pixels of each property, 0 if it declares no size.
        size: Pixels of each item.
        made_of: Items that a derived image is composed of.
        beside: Auxiliary images, such as alpha, which are decoded with the item.
        places: Data locations, as (construction method, offset, length).
        idat: Item data inside of the meta box.
    """

    sizes: list[int] = field(default_factory=list)
    kinds: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    properties: list[int] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    made_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    idat: bytes = b""

    def parts(self, item: int) -> list[int]:
        """Return the items that are decoded to compose a derived image."""
        return [decoded for part in self.made_of[item] for decoded in (part, *self.beside[part])]


def count_pixels(payload: bytes) -> tuple[int, int]:
    """Return the pixels of the largest image, and the total pixels decoded to compose derived images.

    Raises:
        ValueError: The boxes are malformed or ambiguous.
    """
    try:
        items, _ = _read_file(payload)
        largest, together = max(items.sizes, default=0), 0
        for item, kinds in items.kinds.items():
            if kinds & DERIVED:
                if kinds & TILED and item in items.places:
                    largest = max(largest, _canvas_pixels(_data(payload, items, item), kinds))
                together += sum(items.size[part] for part in items.parts(item))
                _check_nesting(items, item, kinds)
        if any(items.beside.get(image) for images in items.beside.values() for image in images):
            raise ValueError("an auxiliary image has an auxiliary image")
    except (struct.error, IndexError) as error:
        raise ValueError(f"a box is truncated ({error})") from error
    return largest, together


def coded_data(payload: bytes, kind: bytes) -> Iterator[bytes]:
    """Yield the data of each image of a coding, such as av01, and the first sample of each track.

    Raises:
        ValueError: The boxes are malformed or ambiguous, or refer to far more data than the file has.
    """
    try:
        items, movies = _read_file(payload)
        remaining = MAX_DATA_FACTOR * len(payload)
        for item, places in items.places.items():
            if kind in items.kinds[item]:
                if len(places) > MAX_EXTENTS:
                    raise ValueError("the data of an image has too many extents")
                parts = []
                for method, offset, length in places:
                    whole = items.idat if method else payload
                    parts.append(whole[offset : offset + length] if length else whole[offset:])
                    remaining -= len(parts[-1])
                    if remaining < 0:
                        raise ValueError("images share the same data")
                yield b"".join(parts)
        for movie in movies:
            for name, track in _boxes(movie):
                if name == b"trak" and (sample := _first_sample(payload, track)) is not None:
                    yield sample
    except (struct.error, IndexError) as error:
        raise ValueError(f"a box is truncated ({error})") from error


def _read_file(payload: bytes) -> tuple[HeifItems, list[bytes]]:
    """Return the items of the file, and the contents of its movie boxes."""
    items = HeifItems()
    found = list(_boxes(payload))
    _check_unique(frozenset({b"meta"}), found)
    for kind, body in found:
        if kind == b"mini":
            raise ValueError("the compact header (mini box) is not supported")
        if kind == b"meta":
            _read_meta(body[4:], items)
    return items, [body for kind, body in found if kind == b"moov"]


def _first_sample(payload: bytes, track: bytes) -> bytes | None:
    """Return the data of a track's first sample (ISO/IEC 14496-12, 8.7), None if it has none."""
    table = track
    for name in (b"mdia", b"minf", b"stbl"):
        table = next((body for kind, body in _boxes(table) if kind == name), b"")
    boxes = dict(_boxes(table))
    if b"stsz" not in boxes or not (boxes.keys() & {b"stco", b"co64"}):
        return None
    size, count = struct.unpack_from(">II", boxes[b"stsz"], 4)
    if count == 0:
        return None
    (size,) = (size,) if size else struct.unpack_from(">I", boxes[b"stsz"], 12)
    form, chunks = (">I", boxes[b"stco"]) if b"stco" in boxes else (">Q", boxes[b"co64"])
    (offset,) = struct.unpack_from(form, chunks, 8)
    return payload[offset : offset + size]


def _check_nesting(items: HeifItems, item: int, kinds: set[bytes]) -> None:
    """Reject nested derived images, whose cost multiplies. Only tone maps and copies may refer to a grid."""
    allowed = frozenset() if kinds & TILED else TILED
    for part in items.parts(item):
        if items.kinds.get(part, set()) & (DERIVED - allowed):
            raise ValueError("derived images are nested")


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    for _ in range(MAX_BOXES):
        if at + 8 > len(data):
            return
        size, head = int.from_bytes(data[at : at + 4]), 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16]), 16
        elif size == 0:
            size = len(data) - at
        if size < head:
            raise ValueError("a box is smaller than its header")
        yield data[at + 4 : at + 8], data[at + head : at + size]
        at += size
    raise ValueError(f"more than {MAX_BOXES} boxes")


def _read_meta(meta: bytes, items: HeifItems) -> None:
    found = list(_boxes(meta))
    _check_unique(UNIQUE_BOXES, found)
    # Properties come before the associations that refer to them, in any file order.
    for kind, body in found:
        if kind == b"iprp":
            inner = list(_boxes(body))
            _check_unique(frozenset({b"ipco"}), inner)
            for name, part in inner:
                if name == b"ipco":
                    _read_properties(part, items)
            for name, part in inner:
                if name == b"ipma":
                    _read_associations(part, items)
        elif kind == b"iinf":
            start = 6 if body[0] == 0 else 8
            for name, part in _boxes(body[start:]):
                if name == b"infe" and part[0] >= 2:
                    wide = part[0] == 3
                    (item,) = struct.unpack_from(">I" if wide else ">H", part, 4)
                    at = 4 + (4 if wide else 2) + 2
                    items.kinds[item].add(part[at : at + 4])
        elif kind == b"iref":
            form = ">I" if body[0] else ">H"
            for name, part in _boxes(body[4:]):
                if name in (b"dimg", b"auxl"):
                    width = struct.calcsize(form)
                    (item,) = struct.unpack_from(form, part)
                    (count,) = struct.unpack_from(">H", part, width)
                    others = struct.unpack_from(f">{count}{form[1]}", part, width + 2)
                    if name == b"dimg":
                        items.made_of[item] += others
                    else:
                        for other in others:
                            items.beside[other].append(item)
        elif kind == b"iloc":
            _read_locations(body, items)
        elif kind == b"idat":
            items.idat = body


def _check_unique(kinds: frozenset[bytes], boxes: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in boxes if name in kinds]
    if len(names) > len(set(names)):
        raise ValueError("a unique box occurs twice")


def _read_properties(body: bytes, items: HeifItems) -> None:
    for name, part in _boxes(body):
        pixels = 0
        if name == b"ispe":
            width, height = struct.unpack_from(">II", part, 4)
            pixels = width * height
            items.sizes.append(pixels)
        items.properties.append(pixels)


def _read_associations(body: bytes, items: HeifItems) -> None:
    wide, form = body[3] & 1, ">I" if body[0] else ">H"
    (count,) = struct.unpack_from(">I", body, 4)
    at = 8
    for _ in range(count):
        (item,) = struct.unpack_from(form, body, at)
        at += struct.calcsize(form)
        several = body[at]
        at += 1
        for _ in range(several):
            index = struct.unpack_from(">H", body, at)[0] & 0x7FFF if wide else body[at] & 0x7F
            at += 2 if wide else 1
            if 0 < index <= len(items.properties):
                items.size[item] = max(items.size[item], items.properties[index - 1])


def _read_locations(body: bytes, items: HeifItems) -> None:
    version, sizes = body[0], body[4:6]
    offset_size, length_size, base_size, index_size = sizes[0] >> 4, sizes[0] & 15, sizes[1] >> 4, sizes[1] & 15
    at = 6
    if not NUMBER_SIZES.issuperset((offset_size, length_size, base_size, index_size if version else 0)):
        raise ValueError("iloc has an invalid field size")

    def number(size: int) -> int:
        nonlocal at
        if at + size > len(body):
            raise IndexError("iloc")
        at += size
        return int.from_bytes(body[at - size : at])

    for _ in range(number(2 if version < 2 else 4)):
        item = number(2 if version < 2 else 4)
        if item in items.places:
            raise ValueError("an item occurs in iloc twice")
        places = items.places[item] = []
        method = number(2) & 15 if version > 0 else 0
        number(2)
        base = number(base_size)
        for _ in range(number(2)):
            if version > 0:
                number(index_size)
            offset = base + number(offset_size)
            places.append((method, offset, number(length_size)))


def _data(payload: bytes, items: HeifItems, item: int) -> bytes:
    """Return the beginning of a derived image's data, which declares its canvas.

    Raises:
        ValueError: Readers may disagree on the bytes. Some read an extent without a length as empty, others as all
            remaining bytes.
    """
    places = items.places[item]
    if len(places) > MAX_EXTENTS or any(method > 1 or length == 0 for method, _, length in places):
        raise ValueError("the data of a derived image has too many extents, or empty ones")
    return b"".join(
        (items.idat if method else payload)[offset : offset + min(length, 64)] for method, offset, length in places
    )


def _canvas_pixels(data: bytes, kinds: set[bytes]) -> int:
    """Return the canvas pixels of a grid or an overlay, the larger if the item claims to be both."""
    wide = ">II" if data[1] & 1 else ">HH"
    found = [0]
    if b"grid" in kinds:
        found.append(_product(struct.unpack_from(wide, data, 4)))
    if b"iovl" in kinds:
        found.append(_product(struct.unpack_from(wide, data, 2 + 8)))
    return max(found)


def _product(sides: tuple[int, ...]) -> int:
    return sides[0] * sides[1]
