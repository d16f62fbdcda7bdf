"""Checks of a face set before a training run."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.vision.alignment import CROP_SIZE_PX
from training.config import ConfigError, DataConfig
from training.data.identities import IdentityList, decode_rgb, list_identities, map_in_threads
from training.data.recordio import FaceRecords
from training.data.subsampling import evenly_spaced_rows
from training.progress import track

MAX_NAMED: Final = 5


@dataclass(frozen=True)
class Preflight:
    """Findings of `preflight`. Images are named by path, or by record file and key."""

    people: int
    images: int
    checked: int
    """Number of images read; the findings below cover these."""
    images_per_person: tuple[int, float, int]
    """Minimum, median, maximum."""
    people_dropped: int
    """People with fewer than ``data.min_images``."""
    unreadable: tuple[str, ...]
    """Sentences with the name and the reason."""
    wrong_size: tuple[str, ...]
    """Images that are not ``crop_px`` wide and high, in a set declared as aligned."""
    duplicates_within: tuple[tuple[str, ...], ...]
    """Groups of byte-identical images of one person."""
    duplicates_across: tuple[tuple[str, ...], ...]
    """Groups of byte-identical images labeled as different people."""
    unused_labels: int
    """Unused labels below the maximum, for record files."""
    ignored: tuple[str, ...] = ()
    """Files of a folder that are not used."""
    crop_px: int = CROP_SIZE_PX
    hidden: int = 0
    """Hidden files and folders, and those that operating systems create."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return names and values for a table."""
        minimum, median, maximum = self.images_per_person
        return [
            ("People", f"{self.people:,}"),
            ("Images", f"{self.images:,}"),
            ("Images checked", f"{self.checked:,}"),
            ("Images per person (min, median, max)", f"{minimum}, {median:g}, {maximum}"),
            ("People with too few images", f"{self.people_dropped:,}"),
            ("Unreadable images", f"{len(self.unreadable):,}"),
            ("Images of the wrong size", f"{len(self.wrong_size):,}"),
            ("Groups of equal images, one person", f"{len(self.duplicates_within):,}"),
            ("Groups of equal images, several people", f"{len(self.duplicates_across):,}"),
            ("Files that are not used", f"{len(self.ignored):,}"),
            ("Hidden files and folders", f"{self.hidden:,}"),
        ]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings with a remedy each; empty if there are none."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.unreadable:
            yield f"{len(self.unreadable)} images cannot be read{_first(self.unreadable, ': ')}"
        if self.wrong_size:
            yield (
                f"{len(self.wrong_size)} images are not {self.crop_px}x{self.crop_px}{_first(self.wrong_size)}: set "
                "data.crop_px to the side of your crops (inspect: --crop-px), align them again, or set data.aligned to "
                "false and name a pack with --align-with"
            )
        if self.duplicates_across:
            yield (
                f"{len(self.duplicates_across)} images are labeled as more than one person, first "
                f"{' = '.join(self.duplicates_across[0])}: correct the labels, or merge the people if they are one"
            )
        if self.duplicates_within:
            copies = sum(len(group) - 1 for group in self.duplicates_within)
            yield (
                f"{copies} images repeat another of the same person, first "
                f"{' = '.join(self.duplicates_within[0])}: remove the copies"
            )
        if self.ignored:
            yield f"{len(self.ignored)} files are not used{_first(self.ignored)}: expected photos in people's folders"
        if self.people_dropped:
            yield f"{self.people_dropped} people have too few images and are excluded: see data.min_images"
        if self.unused_labels:
            yield (
                f"{self.unused_labels} labels have no image: the file may be incomplete. Runs renumber the remaining "
                "labels, so their classes differ from the labels of the file"
            )


def _first(names: Sequence[str], before: str = ", first ") -> str:
    """Return the first names of many, whole."""
    more = f" and {len(names) - MAX_NAMED} more (--json names all)" if len(names) > MAX_NAMED else ""
    return f"{before}{'; '.join(names[:MAX_NAMED])}{more}"


def preflight(config: DataConfig, sample: int | None = None) -> Preflight:
    """Read every image of a set, or ``sample`` evenly spaced ones, and report all problems. Raises ConfigError if the
    set cannot be listed (see `list_identities`)."""
    listed = list_identities(config)
    rows = evenly_spaced_rows(len(listed), len(listed) if sample is None else sample)
    checks = list(track(map_in_threads(lambda i: _check_image(listed, i), rows), "inspect", "photos", len(rows)))
    read = [(i, *check) for i, check in zip(rows, checks, strict=True) if not isinstance(check, str)]
    counts = np.bincount(listed.labels)
    labels = listed.source.labels if isinstance(listed.source, FaceRecords) else None
    within, across = _duplicates(listed, [(i, digest) for i, digest, _ in read])
    return Preflight(
        people=len(listed.names),
        images=len(listed),
        checked=len(rows),
        images_per_person=(int(counts.min()), float(np.median(counts)), int(counts.max())),
        people_dropped=listed.dropped,
        unreadable=tuple(check for check in checks if isinstance(check, str)),
        wrong_size=tuple(
            listed.name(i) for i, _, size_px in read if config.aligned and size_px != (config.crop_px, config.crop_px)
        ),
        duplicates_within=within,
        duplicates_across=across,
        unused_labels=int(labels.max()) + 1 - len(np.unique(labels)) if labels is not None else 0,
        ignored=() if listed.files is None else listed.files.ignored,
        crop_px=config.crop_px,
        hidden=0 if listed.files is None else listed.files.hidden,
    )


def _check_image(listed: IdentityList, i: int) -> tuple[bytes, tuple[int, int]] | str:
    """Return the hash of an image's bytes, and its size; or name and reason of one that cannot be read."""
    try:
        encoded = listed.read_encoded(i)
        image = decode_rgb(encoded, listed.name(i))
    except ConfigError as error:
        return str(error)
    return hashlib.blake2b(encoded, digest_size=16).digest(), (image.shape[0], image.shape[1])


def _duplicates(
    listed: IdentityList, digests: Iterable[tuple[int, bytes]]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return groups of equal images: of one person, and of several."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for i, digest in digests:
        groups[digest].append(i)
    within, across = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for rows in groups.values():
        if len(rows) > 1:
            several = len(set(listed.labels[rows].tolist())) > 1
            (across if several else within).append(tuple(listed.name(i) for i in rows))
    return tuple(within), tuple(across)
