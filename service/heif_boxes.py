"""How many pixels a HEIF's images may cost, by its boxes (ISO/IEC 14496-12 and 23008-12). Pure.

libheif tells the size that is left once the image is cropped, and makes a grid of as many tiles as are said:
what is decoded on the way is to be known before. Where properties contradict each other, the largest counts; where
readers differ in which bytes say how large an image is (boxes that come twice, extents without a length), none does.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

TILED: Final = frozenset({b"grid", b"iovl"})
DERIVED: Final = TILED | {b"iden", b"tmap"}
ONCE: Final = frozenset({b"pitm", b"iinf", b"iref", b"iprp", b"iloc", b"idat"})
"""Boxes that a file's meta has at most one of (ISO/IEC 14496-12, 8.11)."""
NUMBER_SIZES: Final = frozenset({0, 4, 8})
"""Of iloc's fields, in bytes; libheif passes over a field of another size without reading it."""
MOST_BOXES: Final = 100_000
MOST_EXTENTS: Final = 16


@dataclass
class Items:
    """Of a file: ``sizes`` of all images, ``size`` of each item in pixels, its ``kinds``, what it is ``made_of``, what
    is ``beside`` it (alpha, which is decoded with it), and where its data are, as (construction method, offset,
    length)."""

    sizes: list[int] = field(default_factory=list)
    kinds: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    properties: list[int] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    made_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    idat: bytes = b""

    def parts(self, item: int) -> list[int]:
        """What is decoded to put it together."""
        return [decoded for part in self.made_of[item] for decoded in (part, *self.beside[part])]


def costs(payload: bytes) -> tuple[int, int]:
    """The largest image that is stored or put together, and what all that are put together are made of, in pixels.

    Raises ValueError: the boxes cannot be read, or not in one way alone.
    """
    items = Items()
    try:
        found = list(_boxes(payload))
        _check_once(frozenset({b"meta"}), found)
        for kind, body in found:
            if kind == b"mini":
                raise ValueError("a header of the short kind, which is not read here")
            if kind == b"meta":
                _read_meta(body[4:], items)
        largest, together = max(items.sizes, default=0), 0
        for item, kinds in items.kinds.items():
            if kinds & DERIVED:
                if kinds & TILED and item in items.places:
                    largest = max(largest, _canvas(_data(payload, items, item), kinds))
                together += sum(items.size[part] for part in items.parts(item))
                _check_nesting(items, item, kinds)
        if any(items.beside.get(image) for images in items.beside.values() for image in images):
            raise ValueError("an auxiliary image has one itself")
    except (struct.error, IndexError) as error:
        raise ValueError(f"a box ends too early ({error})") from error
    return largest, together


def _check_nesting(items: Items, item: int, kinds: set[bytes]) -> None:
    """A tone map or a copy may be of a grid; what else is made of what is put together costs that again each time."""
    allowed = frozenset() if kinds & TILED else TILED
    for part in items.parts(item):
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
    _check_once(ONCE, found)
    # What others refer to comes first, wherever it stands.
    for kind, body in found:
        if kind == b"iprp":
            inner = list(_boxes(body))
            _check_once(frozenset({b"ipco"}), inner)
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
            _read_places(body, items)
        elif kind == b"idat":
            items.idat = body


def _check_once(kinds: frozenset[bytes], boxes: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in boxes if name in kinds]
    if len(names) > len(set(names)):
        raise ValueError("a box that a file has one of comes twice")


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
    if not NUMBER_SIZES.issuperset((offset_size, length_size, base_size, index_size if version else 0)):
        raise ValueError("iloc has numbers of a size that there is not")

    def number(size: int) -> int:
        nonlocal at
        if at + size > len(body):
            raise IndexError("iloc")
        at += size
        return int.from_bytes(body[at - size : at])

    for _ in range(number(2 if version < 2 else 4)):
        item = number(2 if version < 2 else 4)
        if item in items.places:
            raise ValueError("an item is in iloc twice")
        places = items.places[item] = []
        method = number(2) & 15 if version > 0 else 0
        number(2)
        base = number(base_size)
        for _ in range(number(2)):
            if version > 0:
                number(index_size)
            offset = base + number(offset_size)
            places.append((method, offset, number(length_size)))


def _data(payload: bytes, items: Items, item: int) -> bytes:
    """Of what is put together, as far as its canvas is said there.

    Raises ValueError: where readers may find other bytes: an extent without a length is nothing, or all that follows.
    """
    places = items.places[item]
    if len(places) > MOST_EXTENTS or any(method > 1 or length == 0 for method, _, length in places):
        raise ValueError("what says how an image is put together is in too many pieces, or in empty ones")
    return b"".join(
        (items.idat if method else payload)[offset : offset + min(length, 64)] for method, offset, length in places
    )


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
