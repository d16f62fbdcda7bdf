"""Identity-labeled crops from a manifest, a folder or a record file, decoded once into a uint8 cache."""

from __future__ import annotations

import csv
import logging
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from models.errors import PhotoError
from models.vision.alignment import Alignment, align, standard_alignment
from models.vision.detection import Detector
from models.vision.photo_files import printable_path
from models.vision.photo_reading import decode_photo
from training.config import ConfigError, DataConfig
from training.data.cache import cached_crops
from training.data.class_ids import identify_classes
from training.data.folders import FolderPhotos, photos_below
from training.data.recordio import FaceRecords
from training.data.shards import TarShards, find_shards
from training.progress import track

MAX_READ_AHEAD = 64
"""Decoded images waiting for use. Bounds memory where photos are large and detection is slow."""
T = TypeVar("T")
R = TypeVar("R")
Choose = Callable[[NDArray[np.int64]], NDArray[np.intp]]
"""Function from the label of each photo to the rows to read."""
log = logging.getLogger(__name__)


class ImageSource(Protocol):
    """Encoded images by index."""

    def name(self, i: int) -> str:
        """Return the name of image ``i`` for messages."""

    def read_encoded(self, i: int) -> bytes:
        """Return the encoded bytes of image ``i``. Raises ConfigError if the image cannot be read."""

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        """Return a text that changes if the selected images change."""


@dataclass(frozen=True)
class PhotoFiles:
    """Images in separate files."""

    paths: tuple[Path, ...]

    def name(self, i: int) -> str:
        return printable_path(self.paths[i])

    def read_encoded(self, i: int) -> bytes:
        return read_bytes(self.paths[i])

    def fingerprint(self, rows: NDArray[np.int64]) -> str:
        return "\n".join(_file_stamp(self.paths[i]) for i in rows.tolist())


@dataclass(frozen=True, eq=False)
class IdentityList:
    """Images with labels, not yet decoded.

    Attributes:
        rows: (n,) index of each image in ``source``.
        labels: (n,) class 0..C-1, in the order of ``names``.
        dropped: number of people with fewer than ``min_images``.
        files: the files of a folder, with those that are not used; None for another source.
    """

    source: ImageSource
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    dropped: int
    files: FolderPhotos | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, i: int) -> str:
        return self.source.name(int(self.rows[i]))

    def read_encoded(self, i: int) -> bytes:
        return self.source.read_encoded(int(self.rows[i]))

    def read(self, i: int) -> NDArray[np.uint8]:
        """Decode image ``i`` to (H, W, 3) uint8 RGB. Raises ConfigError if the image cannot be decoded."""
        return decode_rgb(self.read_encoded(i), self.name(i))

    def select(self, rows: NDArray[np.int64]) -> IdentityList:
        """Return the images in these rows, with the same classes."""
        return replace(self, rows=self.rows[rows], labels=self.labels[rows])

    def class_ids(self) -> NDArray[np.int64]:
        """Return (C,) identifiers of the classes, as `identify_classes` does."""
        numbered = not isinstance(self.source, PhotoFiles)
        return identify_classes(self.names, self.labels, self.read_encoded if numbered else None)


@dataclass(frozen=True, eq=False)
class StreamedCrops:
    """Crops that are decoded whenever they are indexed, by a slice or rows."""

    listed: IdentityList
    crop_px: int

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, rows: slice | NDArray[np.integer]) -> NDArray[np.uint8]:
        chosen = np.arange(len(self))[rows]
        crops = np.empty((len(chosen), self.crop_px, self.crop_px, 3), np.uint8)
        for i, row in enumerate(chosen.tolist()):
            crops[i] = _require_crop(self.listed.read(row), self.listed.name(row), self.crop_px)
        return crops


@dataclass(frozen=True, eq=False)
class SelectedCrops:
    """Rows of a larger set of crops, read whenever they are indexed, by a slice or rows."""

    crops_NHWC: NDArray[np.uint8]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | NDArray[np.integer]) -> NDArray[np.uint8]:
        chosen: NDArray[np.uint8] = self.crops_NHWC[self.rows[rows]]
        return chosen


@dataclass(frozen=True)
class IdentitySet:
    """Crops: ``crops_NHWC`` (n, s, s, 3) uint8 RGB, ``labels`` (n,) in 0..C-1, ``class_ids`` (C,) for checkpoints.

    Streamed crops support indexing by rows and slices only, like a memory map whose rows are decoded. ``listed`` has
    the source of each image, ``without_face`` the number of photos that were dropped.
    """

    crops_NHWC: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    class_ids: NDArray[np.int64]
    listed: IdentityList
    without_face: int = 0

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def __len__(self) -> int:
        return len(self.labels)

    def photo_name(self, i: int) -> str:
        """Return the person of image ``i``, and the name of its file or record."""
        return f"{self.names[self.labels[i]]}/{self.listed.name(i).rsplit('/', 1)[-1]}"

    def select(self, rows: NDArray[np.int64]) -> IdentitySet:
        """Return the images in these rows, with the same classes."""
        return replace(
            self,
            crops_NHWC=cast(NDArray[np.uint8], SelectedCrops(self.crops_NHWC, rows)),
            labels=self.labels[rows],
            listed=self.listed.select(rows),
        )

    def without_empty_classes(self) -> IdentitySet:
        """Return the same images, with the classes that have one, in the same order."""
        kept, labels = np.unique(self.labels, return_inverse=True)
        names = tuple(self.names[i] for i in kept.tolist())
        return replace(self, labels=labels.astype(np.int64), names=names, class_ids=self.class_ids[kept])


def list_identities(config: DataConfig) -> IdentityList:
    """List the images of a manifest, folder, record file or shards, without people who have too few images.

    A name may be in any Unicode form, but not in two: those may be one person or two. Raises ConfigError on such names,
    no usable images, a missing manifest column, or a damaged file.
    """
    source: ImageSource
    people: NDArray[np.str_] | NDArray[np.int64]
    files: FolderPhotos | None = None
    records = config.root.suffix == ".rec"
    if records or find_shards(config.root):
        source = FaceRecords(config.root) if records else TarShards(config.root)
        people = source.labels
    else:
        excluded = read_excluded(config.root, config.exclude)
        if config.manifest is None:
            files = photos_below(config.root, in_subfolders=True)
            # The first folders below the root name the person.
            named = slice(0, config.person_folders)
            found = [(file, "/".join(file.relative_to(config.root).parts[:-1][named])) for file in files.photos]
        else:
            found = list(_read_manifest(config))
        pairs = [(file, person) for file, person in found if not excluded & {file, file.name}]
        if config.exclude is not None and len(pairs) == len(found):
            log.warning("%s names no photo of %s: nothing is left out", config.exclude, config.root)
        source = PhotoFiles(tuple(file for file, _ in pairs))
        shown = _show_names(config.root, (name for _, name in pairs))
        people = np.array([shown[name] for _, name in pairs], np.str_)
    names, owners, counts = np.unique(people, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= config.min_images)
    chosen = enough[: config.max_identities]
    if len(chosen) < 2:
        images = "an image" if config.min_images == 1 else f"{config.min_images} images or more"
        raise ConfigError(f"{config.root}: fewer than two people have {images}")
    labels = np.full(len(names), -1)
    labels[chosen] = np.arange(len(chosen))
    rows = np.flatnonzero(labels[owners] >= 0)
    return IdentityList(
        source,
        rows,
        labels[owners[rows]],
        tuple(map(str, names[chosen].tolist())),
        len(names) - len(enough),
        files,
    )


def _show_names(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return each name in printable NFC. Raises ConfigError if two become equal."""
    written: dict[str, str] = {}
    for name in dict.fromkeys(names):
        shown = unicodedata.normalize("NFC", printable_path(name))  # macOS writes decomposed names
        if (other := written.setdefault(shown, name)) != name:
            one, two = (text.encode("unicode_escape").decode("ascii") for text in sorted((other, name)))
            raise ConfigError(
                f"{root}: a name is written in two ways that look the same, {one} = {two} (escaped): rename one if "
                "they are two people, or give both one spelling if they are one"
            )
    return {name: shown for shown, name in written.items()}


def read_excluded(root: Path, listing: Path | None) -> frozenset[Path | str]:
    """Return what a list of photos to leave out names: paths, and names of photos in any folder.

    A line is a path below ``root``, or the name of a photo in any folder, as in InsightFace's lists for MegaFace and
    FaceScrub; in a line with tabs, the second field counts, as there. Lines that begin with # are comments. Raises
    ConfigError: the list cannot be read.
    """
    if listing is None:
        return frozenset()
    try:
        lines = listing.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{listing} cannot be read: {error}. Save it as UTF-8, one path per line") from error
    named = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#")]
    entries = [line.split("\t")[1] if "\t" in line else line for line in named]
    return frozenset([*(root / entry for entry in entries), *(entry for entry in entries if "/" not in entry)])


def _read_manifest(config: DataConfig) -> Iterator[tuple[Path, str]]:
    manifest = config.root / str(config.manifest)
    if not manifest.is_file():
        raise ConfigError(f"manifest {manifest} does not exist. For one folder per person, pass --folder")
    required = {"file", "identity"}
    try:
        with manifest.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            if missing := required - set(reader.fieldnames or ()):
                raise ConfigError(f"manifest {manifest} has no column {', '.join(sorted(missing))}")
            for row in reader:
                if any(row[column] is None for column in required):
                    place = f"manifest {manifest}, line {reader.line_num}"
                    raise ConfigError(f"{place} has too few columns. Complete or remove it")
                yield manifest.parent / row["file"], row["identity"]
    except ConfigError:
        raise
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"manifest {manifest} cannot be read: {error}. Save it as CSV in UTF-8") from error


def read_rgb(file: Path) -> NDArray[np.uint8]:
    """Decode one photo to (H, W, 3) uint8 RGB. Raises ConfigError if the file cannot be read or decoded."""
    return decode_rgb(read_bytes(file), printable_path(file))


def read_bytes(file: Path) -> bytes:
    """Return the bytes of a file. Raises ConfigError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise _read_error(file, error) from error


def _file_stamp(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError as error:
        raise _read_error(file, error) from error
    return f"{file} {stat.st_size} {stat.st_mtime_ns}"


def _read_error(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{printable_path(file)} cannot be read ({error.strerror}). Restore it or remove it from the list"
    )


def decode_rgb(encoded: bytes, name: str, mode: int = cv2.IMREAD_COLOR) -> NDArray[np.uint8]:
    """Decode a photo to (H, W, 3) uint8 RGB; ``mode`` is one of OpenCV's color modes. Raises ConfigError if decoding
    failed; the message contains ``name``."""
    try:
        return decode_photo(encoded, mode)
    except PhotoError as error:
        raise ConfigError(f"{name} cannot be decoded ({error}). Remove or repair it") from error


def load_identities(
    config: DataConfig,
    cache_dir: Path,
    detector: Detector | None = None,
    choose: Choose | None = None,
    alignment: Alignment | None = None,
) -> IdentitySet:
    """Return all crops from a memory-mapped cache, built on first use, or streamed with ``data.workers``.

    ``choose`` selects the photos to read; default: all.

    Unaligned photos need ``detector``: the largest face of each photo is aligned, by default to the standard template,
    and photos without a face are dropped with a warning. With several processes, build the cache in one of them first.
    Raises ConfigError as `list_identities` does, or if a crop has the wrong size or the detector is missing.
    """
    listed = list_identities(config)
    if choose is not None:
        listed = listed.select(choose(listed.labels))
    if listed.files is not None and listed.files.warning is not None:
        log.warning(listed.files.warning)
    if config.workers:
        crops = cast(NDArray[np.uint8], StreamedCrops(listed, config.crop_px))
        return IdentitySet(crops, listed.labels, listed.names, listed.class_ids(), listed)
    fitted = alignment or standard_alignment(config.crop_px)
    shape = config.crop_px if fitted.is_standard else fitted
    identity = f"{config.root} {config.aligned} {shape} {listed.source.fingerprint(listed.rows)}"

    def fill(crops_NHWC: NDArray[np.uint8]) -> NDArray[np.int64]:
        if not config.aligned and detector is None:
            raise ConfigError(
                "Unaligned photos need a detector. Align them by 'kith-train run' or 'resume' with --align-with"
            )
        return _decode(listed, crops_NHWC, None if config.aligned else detector, fitted)

    crops, kept = cached_crops(cache_dir, "crops", identity, len(listed), config.crop_px, fill)
    found = listed.select(kept)
    return IdentitySet(
        crops[: len(found)], found.labels, found.names, listed.class_ids(), found, len(listed) - len(found)
    )


def map_in_threads(
    task: Callable[[T], R], items: Iterable[T], threads: int | None = None, ahead: int = MAX_READ_AHEAD
) -> Iterator[R]:
    """Map in threads, in order, at most ``ahead`` results before their use."""
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(task, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for waiting in pending:
                waiting.cancel()


def _require_crop(image: NDArray[np.uint8], name: str, crop_px: int) -> NDArray[np.uint8]:
    height, width = image.shape[:2]
    if (height, width) != (crop_px, crop_px):
        raise ConfigError(
            f"{name} is {width}x{height}, not a {crop_px}x{crop_px} crop. Set data.crop_px to the side of your crops, "
            "or align photos with --align-with"
        )
    return image


def _decode(
    listed: IdentityList, crops_NHWC: NDArray[np.uint8], detector: Detector | None, alignment: Alignment
) -> NDArray[np.int64]:
    """Fill crops in order, and return the rows of those with a face."""
    kept, crop_px = list[int](), crops_NHWC.shape[1]
    for i, image in enumerate(track(map_in_threads(listed.read, range(len(listed))), "decode", "photos", len(listed))):
        if detector is None:
            crops_NHWC[len(kept)] = _require_crop(image, listed.name(i), crop_px)
        else:
            faces = detector.detect([image])[0]
            if not len(faces):
                log.warning("dropped %s: no face found", listed.name(i))
                continue
            crops_NHWC[len(kept)] = align(image, faces.landmarks_xy[faces.largest()][None], alignment)[0]
        kept.append(i)
    return np.array(kept, np.int64)
