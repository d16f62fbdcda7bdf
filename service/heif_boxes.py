"""How many pixels a HEIF's images may cost, by its boxes (ISO/IEC 14496-12 and 23008-12). Pure.

libheif tells the size that is left once the image is cropped, and makes a grid of as many tiles as are said:
what is decoded on the way is to be known before. Where boxes contradict each other, or come twice, the largest counts.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

TILED: Final = frozenset({b"grid", b"iovl"})
DERIVED: Final = TILED | {b"iden", b"tmap"}
MOST_BOXES: Final = 100_000


@dataclass
class Items:
    """Of a file: ``sizes`` of all images, ``size`` of each item in pixels, its ``kinds``, what it is ``made_of``, and
    where its data are, as (in ``idat``, offset, length)."""

    sizes: list[int] = field(default_factory=list)
    kinds: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    properties: list[int] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    made_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: dict[int, list[tuple[bool, int, int]]] = field(default_factory=lambda: defaultdict(list))
    idat: bytes = b""


def costs(payload: bytes) -> tuple[int, int]:
    """The largest image that is stored or put together, and what all that are put together are made of, in pixels.

    Raises ValueError: the boxes cannot be read.
    """
    items = Items()
    try:
        for kind, body in _boxes(payload):
            if kind == b"meta":
                _read_meta(body[4:], items)
        largest, together = max(items.sizes, default=0), 0
        for item, kinds in items.kinds.items():
            if kinds & DERIVED:
                largest = max(largest, *(_canvas(data, kinds) for data in _data(payload, items, item)), 0)
                together += sum(items.size[part] for part in items.made_of[item])
                _check_nesting(items, item, kinds)
    except (struct.error, IndexError) as error:
        raise ValueError(f"a box ends too early ({error})") from error
    return largest, together


def _check_nesting(items: Items, item: int, kinds: set[bytes]) -> None:
    """A tone map or a copy may be of a grid; what else is made of what is put together costs that again each time."""
    allowed = frozenset() if kinds & TILED else TILED
    for part in items.made_of[item]:
        if items.kinds.get(part, set()) & (DERIVED - allowed):
            raise ValueError("images are put together of images that are put together")


def _boxes(data: bytes, most: int = MOST_BOXES) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    for _ in range(most):
        if at + 8 > len(data):
            return
        size, head = int.from_bytes(data[at : at + 4]), 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16]), 16
        elif size == 0:
            size = len(data) - at
        if size < head:
            raise ValueError("a box is smaller than its head")
        yield data[at + 4 : at + 8], data[at + head : at + size]
        at += size
    raise ValueError(f"more than {most} boxes")


def _read_meta(meta: bytes, items: Items) -> None:
    found = list(_boxes(meta))
    # What others refer to comes first, wherever it stands.
    for kind, body in found:
        if kind == b"iprp":
            inner = list(_boxes(body))
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
                if name == b"dimg":
                    width = struct.calcsize(form)
                    (item,) = struct.unpack_from(form, part)
                    (count,) = struct.unpack_from(">H", part, width)
                    items.made_of[item] += struct.unpack_from(f">{count}{form[1]}", part, width + 2)
        elif kind == b"iloc":
            _read_places(body, items)
        elif kind == b"idat":
            items.idat = body


def _read_properties(body: bytes, items: Items) -> None:
    for name, part in _boxes(body):
        pixels = 0
        if name == b"ispe":
            width, height = struct.unpack_from(">II", part, 4)
            pixels = width * height
            items.sizes.append(pixels)
        items.properties.append(pixels)


def _read_associations(body: bytes, items: Items) -> None:
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


def _read_places(body: bytes, items: Items) -> None:
    version, sizes = body[0], body[4:6]
    offset_size, length_size, base_size, index_size = sizes[0] >> 4, sizes[0] & 15, sizes[1] >> 4, sizes[1] & 15
    at = 6

    def number(size: int) -> int:
        nonlocal at
        if at + size > len(body):
            raise IndexError("iloc")
        at += size
        return int.from_bytes(body[at - size : at])

    for _ in range(number(2 if version < 2 else 4)):
        item = number(2 if version < 2 else 4)
        in_idat = version > 0 and number(2) & 15 == 1
        number(2)
        base = number(base_size)
        for _ in range(number(2)):
            if version > 0:
                number(index_size)
            offset = base + number(offset_size)
            items.places[item].append((in_idat, offset, number(length_size)))


def _data(payload: bytes, items: Items, item: int) -> Iterator[bytes]:
    """Each way to read it: its first piece, and all of them."""
    pieces = []
    for in_idat, offset, length in items.places[item][:16]:
        source = items.idat if in_idat else payload
        pieces.append(source[offset : offset + (min(length, 64) or 64)])
    yield from ((pieces[0], b"".join(pieces)) if pieces else ())


def _canvas(data: bytes, kinds: set[bytes]) -> int:
    """Of a grid or an overlay; the largest, where it is said to be both."""
    wide = ">II" if data[1] & 1 else ">HH"
    found = [0]
    if b"grid" in kinds:
        found.append(_product(struct.unpack_from(wide, data, 4)))
    if b"iovl" in kinds:
        found.append(_product(struct.unpack_from(wide, data, 2 + 8)))
    return max(found)


def _product(sides: tuple[int, ...]) -> int:
    return sides[0] * sides[1]
