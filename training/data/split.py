"""Images that are not trained on: of held-out people, and held-out images of the trained people."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from training import distributed
from training.config import DataConfig
from training.data.identities import IdentitySet, PhotoFiles

MAX_PEOPLE: Final = 50
MAX_PHOTOS: Final = 1000
"""Largest numbers that a run holds out, and embeds after every epoch: the photos on average."""
MIN_TRAINED: Final = 2
"""Photos of a person that are always trained on."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """Images to train on, and those that measure the network.

    Attributes:
        people: all photos of people who are not trained on; None if there are none.
        photos: photos of trained people that are not trained on, and one photo of each of these people that is, to
            compare them with; None if there are none.
    """

    train: IdentitySet
    people: IdentitySet | None
    photos: IdentitySet | None


def split_identities(data: IdentitySet, config: DataConfig, seed: int) -> Split:
    """Hold out the shares that ``config`` names, at most `MAX_PEOPLE` people and about `MAX_PHOTOS` photos of others.

    Who is held out depends on the seed and the names of the people; which photos, on the seed, the person and the name
    of the file. So a run resumes with the split that it began with, from another folder and with further photos, too.
    A part of fewer than two people is not held out.
    """
    of_strangers = np.isin(data.labels, _choose_people(data, config.held_out_people, seed))
    people = data.select(np.flatnonzero(of_strangers)).without_empty_classes() if of_strangers.any() else None
    known = data.select(np.flatnonzero(~of_strangers)).without_empty_classes() if people else data
    held = _choose_photos(known, config.held_out_photos, seed)
    photos = None
    if len(np.unique(known.labels[held])) >= 2:
        kept = np.setdiff1d(np.arange(len(known)), held)
        owners, first = np.unique(known.labels[kept], return_index=True)
        references = kept[first[np.isin(owners, known.labels[held])]]
        photos = known.select(np.sort(np.concatenate([held, references]))).without_empty_classes()
        known = known.select(kept)
    found = f"{0 if people is None else people.num_classes} people, {len(held) if photos else 0} photos of others"
    if distributed.rank() == 0:
        log.info("held out: %s (data.held_out_people, data.held_out_photos)", found)
    return Split(known, people, photos)


def _choose_people(data: IdentitySet, share: float, seed: int) -> NDArray[np.intp]:
    """Return the classes to hold out, a share of those with images; none if they or the others are fewer than two."""
    sizes = np.bincount(data.labels, minlength=data.num_classes)
    present = np.flatnonzero(sizes)
    order = present[np.argsort(_uniforms(data.class_ids[present], seed), kind="stable")]
    chosen = order[: min(int(share * len(present)), MAX_PEOPLE)]
    return chosen if len(chosen) >= 2 and len(present) - len(chosen) >= 2 else chosen[:0]


def _choose_photos(data: IdentitySet, share: float, seed: int) -> NDArray[np.intp]:
    """Return the rows to hold out. Each is chosen by its own number, so that further photos change no other's fate."""
    if not share:
        return np.empty(0, np.intp)
    drawn = _uniforms(_photo_keys(data), seed)
    order = np.lexsort((-drawn, data.labels))  # by person, the largest number first
    counts = np.bincount(data.labels)
    place = np.empty(len(data), np.int64)
    place[order] = np.arange(len(data)) - np.repeat(np.cumsum(counts) - counts, counts)
    limit = MAX_PHOTOS / 2 ** len(data).bit_length()  # changes only where the set doubles
    return np.flatnonzero((drawn < min(share, limit)) & (place >= MIN_TRAINED))


def _photo_keys(data: IdentitySet) -> NDArray[np.int64]:
    """Return (n,) hashes of person and file name, or of person and number for record files and shards."""
    people = data.class_ids[data.labels]
    source = data.listed.source
    if not isinstance(source, PhotoFiles):
        return people ^ data.listed.rows
    names = (source.paths[row].name.encode("utf-8", "surrogatepass") for row in data.listed.rows.tolist())
    hashes = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True) for name in names]
    return people ^ np.array(hashes, np.int64)


def _uniforms(keys: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key: SplitMix64 (G. Steele et al., OOPSLA 2014)."""
    mixed = keys.astype(np.uint64) + np.array(seed + 1, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11), np.float64) * 2.0**-53
