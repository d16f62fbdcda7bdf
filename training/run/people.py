"""People and photos that a run is not trained on: figures after each epoch, and the worst pairs at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.vision.alignment import Alignment
from models.vision.detection import Detector
from training.config import DataConfig
from training.data.identities import IdentitySet
from training.data.split import Split
from training.data.subsampling import evenly_spaced_rows, limit_per_label
from training.evaluation import plots
from training.evaluation.embedding import Embed, embed_crops, embed_people
from training.evaluation.people import PeopleResult, PhotoPair, Rate, evaluate_people

MAX_PHOTOS: Final = 3000
"""Photos of a folder that are compared with each other: 4.5 million pairs."""
MAX_PHOTOS_PER_PERSON: Final = 50
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class MeasuredPeople:
    """Crops of labeled people, and the figures of a network on them."""

    title: str
    data: IdentitySet
    result: PeopleResult

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and the value, with its 95 % interval, of each figure."""
        counts = f"{self.result.people:,} people, {self.result.photos:,} photos"
        rows = [(self.title, counts)]
        rows += [(f"{self.title}: {name}", _format_rate(rate)) for name, rate in self.result.rates.items()]
        return [*rows, *((f"{self.title}: too small", reason) for reason in self.result.too_small)]


def _format_rate(rate: Rate) -> str:
    if isinstance(rate, float):
        return f"{rate:.2%}"
    value, low, high = rate
    return f"{value:.2%} ({low:.2%} to {high:.2%})"


def own_photos(root: Path, aligned: bool) -> DataConfig:
    """Return the settings that read a record file, a folder with manifest.csv, or one folder per person."""
    manifest = "manifest.csv" if (root / "manifest.csv").is_file() else None
    return DataConfig(root, manifest, aligned=aligned or root.suffix == ".rec", min_images=1)


def measure_folder(
    embed: Embed, alignment: Alignment, detector: Detector, photos: DataConfig, cache: Path, flip: bool = False
) -> MeasuredPeople:
    """Measure an embedder of crops of this alignment on photos of labeled people, with intervals. The largest face of
    each photo counts. Of larger sets, evenly spaced photos and people are measured, about `MAX_PHOTOS`. Raises as
    `embed_people`."""
    chosen, vectors = embed_people(embed, alignment, detector, photos, cache, _spaced_photos, flip)
    return MeasuredPeople(photos.root.name, chosen, evaluate_people(vectors, chosen.labels, intervals=True))


def _limited(data: IdentitySet) -> IdentitySet:
    """Return the set, or evenly spaced photos of one with more than `MAX_PHOTOS`."""
    return data if len(data) <= MAX_PHOTOS else data.select(_spaced_photos(data.labels)).without_empty_classes()


def _spaced_photos(labels: NDArray[np.int64]) -> NDArray[np.intp]:
    rows = limit_per_label(MAX_PHOTOS_PER_PERSON, labels)
    people = np.unique(labels[rows])
    measured = people[evenly_spaced_rows(len(people), max(2, len(people) * MAX_PHOTOS // max(1, len(rows))))]
    rows = rows[np.isin(labels[rows], measured)]
    if len(rows) < len(labels):
        log.warning("%d of %d photos are measured, evenly spaced", len(rows), len(labels))
    return rows


class HeldOut:
    """Parts of a split that are not trained on, whose crops are read once."""

    def __init__(self, split: Split) -> None:
        parts = {"held-out people": split.people, "held-out photos": split.photos}
        limited = {title: _limited(part) for title, part in parts.items() if part is not None}
        self._parts = {
            title: replace(part, crops_NHWC=part.crops_NHWC[np.arange(len(part))]) for title, part in limited.items()
        }

    def __len__(self) -> int:
        return len(self._parts)

    def measure(self, embed: Embed, intervals: bool, flip: bool = False) -> list[MeasuredPeople]:
        """Measure a network on both parts."""
        measured = []
        for title, part in self._parts.items():
            vectors = embed_crops(embed, part.crops_NHWC, flip)
            measured.append(MeasuredPeople(title, part, evaluate_people(vectors, part.labels, intervals)))
        return measured


def people_figures(measured: Sequence[MeasuredPeople]) -> list[tuple[str, str]]:
    """Return names and values, with their intervals, for a table."""
    return [row for one in measured for row in one.rows()]


def figures_of(measured: Sequence[MeasuredPeople]) -> dict[str, Rate]:
    """Return all rates by part and name, for validation.csv."""
    return {f"{one.title} {name}": rate for one in measured for name, rate in one.result.rates.items()}


def worst_pairs(measured: Sequence[MeasuredPeople]) -> plots.Figure | None:
    """Draw the worst pairs of each set: most similar ones of different people, least similar ones of one person. Return
    None if there are no pairs."""
    lines: dict[str, list[tuple[NDArray[np.uint8], str]]] = {}
    for one in measured:
        found: Mapping[str, Sequence[PhotoPair]] = {
            "most similar different people": one.result.lookalikes,
            "least similar photos of one person": one.result.mates,
        }
        for kind, pairs in found.items():
            if pairs:
                lines[f"{one.title}: {kind}"] = [_draw(one.data, pair) for pair in pairs]
    return plots.pair_sheet(lines) if lines else None


def write_worst_pairs(path: Path, measured: Sequence[MeasuredPeople]) -> None:
    """Write `worst_pairs` as PNG, if there are any."""
    figure = worst_pairs(measured)
    if figure is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plots.png(figure))


def _draw(data: IdentitySet, pair: PhotoPair) -> tuple[NDArray[np.uint8], str]:
    """Return both crops side by side, and their similarity and names."""
    rows = [pair.first, pair.second]
    crops = [data.crops_NHWC[np.array([row])][0] for row in rows]
    return np.concatenate(crops, 1), "\n".join([f"{pair.similarity:.3f}", *map(data.photo_name, rows)])
