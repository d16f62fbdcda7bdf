"""Look at a face set before an hour is spent on it: what is in it, what is wrong with it, what to do about that."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.alignment import CROP_SIZE_PX
from training.config import ConfigError, DataConfig
from training.data.identities import IdentityList, decode_rgb, in_threads, list_identities
from training.data.recordio import FaceRecords
from training.data.spread import spread_rows

Colour = Literal["RGB", "probably BGR", "grey"]
CROP: Final = (CROP_SIZE_PX, CROP_SIZE_PX)
GREY_DIFFERENCE: Final = 2.0
"""Mean of |red - blue|, of 255, below which an image is grey; the noise of JPEG's chroma is near 1."""
NAME_HEIGHT_PX: Final = 16
MISSING: Final = 64
"""Level of grey of a tile whose image cannot be read."""


@dataclass(frozen=True)
class Preflight:
    """What :func:`preflight` found. Images are called by their path, or by file and key of a record."""

    people: int
    images: int
    checked: int
    """Images read; the findings below are about these."""
    images_per_person: tuple[int, float, int]
    """Least, median, most."""
    people_dropped: int
    """Have fewer than ``data.min_images``."""
    unreadable: tuple[str, ...]
    wrong_size: tuple[str, ...]
    """Not 112x112, where the set says that it is aligned."""
    duplicates_within: tuple[tuple[str, ...], ...]
    """Groups of images of one person that are the same, byte for byte."""
    duplicates_across: tuple[tuple[str, ...], ...]
    """Groups that are the same and shown as different people."""
    label_holes: int
    """Of a record file: numbers from 0 to the greatest label that nobody has."""
    colour: Colour

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What was counted, as a person would read it."""
        least, median, most = self.images_per_person
        return [
            ("People", f"{self.people:,}"),
            ("Images", f"{self.images:,}"),
            ("Images checked", f"{self.checked:,}"),
            ("Images per person (least, median, most)", f"{least}, {median:g}, {most}"),
            ("People with too few images", f"{self.people_dropped:,}"),
            ("Unreadable images", f"{len(self.unreadable):,}"),
            ("Images of the wrong size", f"{len(self.wrong_size):,}"),
            ("Groups of equal images, one person", f"{len(self.duplicates_within):,}"),
            ("Groups of equal images, several people", f"{len(self.duplicates_across):,}"),
            ("Colour order", self.colour),
        ]

    @property
    def warnings(self) -> tuple[str, ...]:
        """In plain words, with what to do; empty where nothing was found."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.unreadable:
            yield (
                f"{len(self.unreadable)} images cannot be read, first {self.unreadable[0]}: restore them or take them "
                "off the list"
            )
        if self.wrong_size:
            yield (
                f"{len(self.wrong_size)} images are not 112x112, first {self.wrong_size[0]}: cut them anew, or set "
                "data.aligned to false and name a pack with --align-with"
            )
        if self.duplicates_across:
            yield (
                f"{len(self.duplicates_across)} images are shown as more than one person, first "
                f"{' = '.join(self.duplicates_across[0])}: correct the labels, or merge the people if they are one"
            )
        if self.duplicates_within:
            copies = sum(len(group) - 1 for group in self.duplicates_within)
            yield (
                f"{copies} images repeat another of the same person, first "
                f"{' = '.join(self.duplicates_within[0])}: remove the copies"
            )
        if self.people_dropped:
            yield f"{self.people_dropped} people have too few images and are left out: see data.min_images"
        if self.label_holes:
            yield (
                f"{self.label_holes} labels below the greatest have no image: the file may be incomplete; Kith numbers "
                "the others anew, so that the classes of its runs are not the labels of the file"
            )
        if self.colour == "probably BGR":
            yield "faces are bluer than red: the channels seem swapped (BGR); write the images anew as RGB"
        if self.colour == "grey":
            yield "most images have no colour: a model trained on them has not learnt colour photos; get colour images"


@dataclass(frozen=True, eq=False)
class _Look:
    """One image: a hash of its bytes, and of its pixels the mean of red - blue and of |red - blue|."""

    digest: bytes = b""
    size_px: tuple[int, int] | None = None
    """None: it cannot be read."""
    red_minus_blue: float = 0.0
    difference: float = 0.0


def preflight(config: DataConfig, sample: int | None = None) -> Preflight:
    """Read every image of a set, or ``sample`` of them spread evenly, and report all that is wrong at once.

    Raises:
        ConfigError: the set cannot even be listed (see :func:`~training.data.identities.list_identities`).
    """
    listed = list_identities(config)
    rows = spread_rows(len(listed), len(listed) if sample is None else sample)
    looks = list(tqdm(in_threads(lambda i: _look(listed, i), rows), total=len(rows), desc="preflight", unit="img"))
    read = [(i, look) for i, look in zip(rows, looks, strict=True) if look.size_px]
    counts = np.bincount(listed.labels)
    within, across = _duplicates(listed, [(i, look.digest) for i, look in read])
    return Preflight(
        people=len(listed.names),
        images=len(listed),
        checked=len(rows),
        images_per_person=(int(counts.min()), float(np.median(counts)), int(counts.max())),
        people_dropped=listed.dropped,
        unreadable=tuple(listed.name(i) for i, look in zip(rows, looks, strict=True) if not look.size_px),
        wrong_size=tuple(listed.name(i) for i, look in read if config.aligned and look.size_px != CROP),
        duplicates_within=within,
        duplicates_across=across,
        label_holes=_holes(listed.source.labels) if isinstance(listed.source, FaceRecords) else 0,
        colour=_colour([look for _, look in read]),
    )


def _look(listed: IdentityList, i: int) -> _Look:
    try:
        encoded = listed.encoded(i)
        image = decode_rgb(encoded, listed.name(i))
    except ConfigError:
        return _Look()
    digest = hashlib.blake2b(encoded, digest_size=16).digest()
    red_minus_blue = image[..., 0].astype(np.int16) - image[..., 2]
    mean, difference = float(red_minus_blue.mean()), float(np.abs(red_minus_blue).mean())
    return _Look(digest, (image.shape[0], image.shape[1]), mean, difference)


def _duplicates(
    listed: IdentityList, digests: Iterable[tuple[int, bytes]]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Groups of equal images: of one person, and of several."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for i, digest in digests:
        groups[digest].append(i)
    alike = [rows for rows in groups.values() if len(rows) > 1]
    names = [tuple(listed.name(i) for i in rows) for rows in alike]
    shared = [len(set(listed.labels[rows].tolist())) > 1 for rows in alike]
    within = tuple(n for n, s in zip(names, shared, strict=True) if not s)
    return within, tuple(n for n, s in zip(names, shared, strict=True) if s)


def _holes(labels: NDArray[np.int64]) -> int:
    return int(labels.max()) + 1 - len(np.unique(labels))


def _colour(looks: list[_Look]) -> Colour:
    """Blood makes every skin redder than blue; a set of faces that are bluer has its channels swapped."""
    if not looks:
        return "RGB"  # nothing speaks against it
    if np.median([look.difference for look in looks]) < GREY_DIFFERENCE:
        return "grey"
    return "RGB" if np.median([look.red_minus_blue for look in looks]) >= 0 else "probably BGR"


def contact_sheet(config: DataConfig, path: Path, people: int = 8, images: int = 6) -> None:
    """Write a PNG with a row of images for each of some people, spread evenly over the set; look at it.

    Raises:
        ConfigError: the set cannot be listed, or the file cannot be written.
    """
    listed = list_identities(config)
    rows = []
    for person in spread_rows(len(listed.names), people):
        own = np.flatnonzero(listed.labels == person)
        tiles = [_tile(listed, int(own[i])) for i in spread_rows(len(own), images)]
        tiles += [np.zeros_like(tiles[0])] * (images - len(tiles))
        rows += [_caption(listed.names[person], images * CROP_SIZE_PX), np.hstack(tiles)]
    encoded = cv2.imencode(".png", cv2.cvtColor(np.vstack(rows), cv2.COLOR_RGB2BGR))[1]
    try:
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise ConfigError(f"the contact sheet {path} cannot be written: {error.strerror}") from error


def _caption(name: str, width_px: int) -> NDArray[np.uint8]:
    strip = np.zeros((NAME_HEIGHT_PX, width_px, 3), np.uint8)
    cv2.putText(strip, name, (3, NAME_HEIGHT_PX - 4), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA)
    return strip


def _tile(listed: IdentityList, i: int) -> NDArray[np.uint8]:
    """An image fitted into 112x112, or a grey square where it cannot be read."""
    try:
        image = listed.read(i)
    except ConfigError:
        return np.full((CROP_SIZE_PX, CROP_SIZE_PX, 3), MISSING, np.uint8)
    tile = np.zeros((CROP_SIZE_PX, CROP_SIZE_PX, 3), np.uint8)
    scale = CROP_SIZE_PX / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    tile[:height, :width] = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return tile
