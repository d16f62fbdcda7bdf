"""Measure how unknown people keep their ids: photos of LFW arrive in random order, and are clustered online.

People with several photos come back; people with one photo do not. All are outside the calibration data, and the
gallery is empty, so that the pack's calibration gives the thresholds. A false merge is the first photo of a person that
is taken for another one. A split is a further id of a person. Each photo is a visit of its own. The photos that
bench.hygiene found to be mislabeled, and the doubtful ones of the open-set protocol, are left out. Prints, and writes
bench/results/strangers.md and .json.

    python -m bench.strangers [--cache runs/cache]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.common import RESULTS, say, table, write
from bench.hygiene import KNOWN_ERRORS, Photos, others_than_view1, photos_of
from bench.photos import arguments, by_person, lfw_or_exit, packs_beside_reference
from models.runtime.network import Float
from service.domain.gallery import GallerySettings
from service.domain.outcomes import RiskTarget
from service.domain.strangers import Remembered
from service.risk.decision import ImpostorRisk
from service.risk.strangers import recall
from training.evaluation.lfw import DOUBTFUL_STRANGERS

RISKS: Final = (0.1, 0.01, 0.001)
SEEDS: Final = range(3)
RETURNING: Final = 500
ONCE: Final = 1500
MAX_PHOTOS: Final = 6
QUALITY: Final = 0.5
"""Quality of each template: the cached vectors have none."""


@dataclass
class Stream:
    """Result of one stream. ``owners``: the person who founded each id, from 1. ``ids``: those a person was given."""

    known: Remembered
    owners: list[str] = field(default_factory=list)
    ids: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    photos: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)
    """First photos of people: ``new``, ``merged`` with another person, or ``none``: between the thresholds."""
    late: Counter[str] = field(default_factory=Counter)
    """The same in the second half of the stream, among more strangers."""
    later: Counter[str] = field(default_factory=Counter)
    """Later photos: ``met`` again, ``split`` into a further id, ``wrong``: another person's id, or ``none``."""


def main() -> None:
    options = arguments().parse_args()
    lfw = lfw_or_exit()
    wrong = {name.split("/")[0] for name in KNOWN_ERRORS} | DOUBTFUL_STRANGERS
    files = [file for file in others_than_view1(lfw) if file.split("/")[0] not in wrong]
    figures: dict[str, Any] = {}
    for name, pack in packs_beside_reference().items():
        say(name)
        photos = photos_of(pack, lfw, options.cache, files)
        figures[name] = {
            str(fpir): summary([clustered(photos, drawn(photos, seed), fpir) for seed in SEEDS]) for fpir in RISKS
        }
    text = markdown(figures)
    write(RESULTS / "strangers.md", text, figures)
    print(text)


def drawn(photos: Photos, seed: int) -> list[int]:
    """Draw people, and return the rows of their photos in random order."""
    rng = np.random.default_rng(seed)
    row_of = {file: row for row, file in enumerate(photos.files.tolist())}
    files = by_person(row_of)
    several = [name for name, own in files.items() if len(own) > 1]
    once = [name for name, own in files.items() if len(own) == 1]
    people = [*rng.permutation(several)[:RETURNING], *rng.permutation(once)[:ONCE]]
    rows = [row_of[file] for name in people for file in rng.permutation(files[name])[:MAX_PHOTOS].tolist()]
    return list(rng.permutation(rows).tolist())


def clustered(photos: Photos, rows: Sequence[int], fpir: float) -> Stream:
    """Cluster the photos in this order at a false-merge rate."""
    model = ImpostorRisk(photos.calibration.curve, "pack", pack=photos.calibration)
    settings = GallerySettings(risk=RiskTarget("fpir", fpir))
    stream = Stream(Remembered.none(photos.vectors.shape[1]))
    for number, row in enumerate(rows):
        person, vector = str(photos.files[row]).split("/")[0], photos.vectors[row]
        is_first = not stream.photos[person]
        stream.photos[person] += 1
        found = recall(vector, stream.known, model, settings)
        result, key = "none", found.stranger_pk
        if found.is_new:
            stream.owners.append(person)
            result, key = "new" if is_first else "split", len(stream.owners)
        elif key is not None:
            result = "met" if stream.owners[key - 1] == person else "merged" if is_first else "wrong"
        if key is not None:
            stream.ids[person].add(key)
            if found.is_new or found.is_diverse:
                stream.known = with_template(stream.known, key, vector)
        if number:  # no one can be mistaken for another in the first photo
            (stream.first if is_first else stream.later)[result] += 1
            if is_first and number > len(rows) / 2:
                stream.late[result] += 1
    return stream


def with_template(known: Remembered, key: int, vector: Float) -> Remembered:
    place = int(np.searchsorted(known.stranger_pks, key, "right"))
    owners = np.insert(known.stranger_pks, place, key)
    vectors = np.insert(known.vectors, place, vector, axis=0)
    return Remembered(0, {}, np.arange(len(owners)), owners, vectors, np.full(len(owners), QUALITY, np.float32))


def summary(streams: Sequence[Stream]) -> dict[str, Any]:
    first, late, later = (
        sum((getattr(stream, part) for stream in streams), Counter[str]()) for part in ("first", "late", "later")
    )
    given = [len(s.ids[name]) for s in streams for name, count in s.photos.items() if count > 1 and s.ids[name]]
    return {
        "streams": len(streams),
        "photos": sum(stream.photos.total() for stream in streams),
        "ids": sum(len(stream.owners) for stream in streams) / len(streams),
        "false merges": first["merged"] / first.total(),
        "false merges in the second half": late["merged"] / max(1, late.total()),
        "first photos": dict(first),
        "first photos without an id": first["none"] / first.total(),
        "later photos": {name: later[name] / later.total() for name in ("met", "split", "wrong", "none")},
        "ids per person": float(np.mean(given)),
        "people with one id": float(np.mean(np.array(given) == 1)),
    }


def markdown(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = []
    for pack, by_risk in figures.items():
        for fpir, found in by_risk.items():
            later = found["later photos"]
            shares = [
                found["false merges"],
                found["false merges in the second half"],
                found["first photos without an id"],
            ]
            shares += [later[name] for name in ("met", "split", "wrong", "none")]
            cells = [f"{share:.2%}" if share < 0.1 else f"{share:.1%}" for share in shares]
            cells += [f"{found['ids per person']:.2f}", f"{found['people with one id']:.1%}"]
            rows.append([pack, f"{float(fpir):.1%}", *cells])
    first, later = "False merges asked | got | in the second half | First photos without an id", "Met again | New id"
    header = f" | {first} | {later} | Another's id | No id | Ids per person | People with one id"
    return f"""# Strangers

`make bench-strangers`

A stream of {RETURNING} people of LFW who come back with up to {MAX_PHOTOS} photos each, and {ONCE:,} with one photo, in
random order, into an empty gallery; mean of {len(SEEDS)} draws. All are outside the calibration. A false merge is the
first photo of a person that is taken for a remembered stranger. The other columns are about later photos of those who
come back, and their ids.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
