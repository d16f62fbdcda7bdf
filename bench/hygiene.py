"""Measure the precision and recall of the hygiene report: duplicates and mislabeled templates planted among people of
LFW.

Uses 350 people with two to four photos, all outside the calibration data. Thirty are split under two ids. Thirty get a
photo of another person: twenty of an enrolled person, ten of a stranger. Settings were chosen on seeds 0 to 9, other
draws from the same 712 people; seeds 100 to 119 are reported. The bundled detector finds the faces for each pack.
Prints, and writes bench/results/hygiene.md and .json.

    python -m bench.hygiene [--cache runs/cache]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, say, table, write
from bench.photos import PULLED, arguments, by_person, lfw_or_exit, packs_beside_reference
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.runtime.network import Float
from service.domain.gallery import Snapshot
from service.risk.hygiene import find_problems
from training.evaluation.embedding import Embedder
from training.evaluation.lfw import PARTS, files_of, people_of, read_pairs
from training.export.calibrate import calibrate

SEEDS: Final = range(100, 120)
PEOPLE: Final = 350
PLANTED: Final = 30
OF_STRANGERS: Final = 10
MAX_PHOTOS: Final = 4
ALL_PHOTOS: Final = 20
OF_ANOTHER: Final = "not who it is labeled as, to the eye"
SWAPPED: Final = "exchanged with one of Nora Bendijo, to the eye"
KNOWN_ERRORS: Final[Mapping[str, str]] = {
    "Elisabeth_Schumacher/Elisabeth_Schumacher_0001.jpg": OF_ANOTHER,
    "Elisabeth_Schumacher/Elisabeth_Schumacher_0002.jpg": OF_ANOTHER,
    "Flor_Montulo/Flor_Montulo_0001.jpg": SWAPPED,
    "Flor_Montulo/Flor_Montulo_0002.jpg": SWAPPED,
    "Nora_Bendijo/Nora_Bendijo_0001.jpg": SWAPPED,
    "Nora_Bendijo/Nora_Bendijo_0002.jpg": SWAPPED,
    "Mahmoud_Abbas/Mahmoud_Abbas_0012.jpg": OF_ANOTHER,
}
"""Wrong labels in LFW, found by reviewing the report on other seeds and on these. This is our own list, made after the
fact: the figures without these photos are the more favorable ones. The errors that the open-set protocol documents
(training.evaluation.lfw.DOUBTFUL_STRANGERS) concern people with one photo, who are not enrolled here."""
SECOND_ID: Final = " (2)"


def others_than_view1(lfw: Path) -> list[str]:
    """Return up to ALL_PHOTOS photos of each person of LFW's lists outside View 1's training list."""
    chosen_on = read_pairs(lfw / "pairsDevTrain.txt")
    known = set(people_of((*chosen_on.first, *chosen_on.second)).tolist())
    files = sorted(set().union(*(files_of(lfw, part) for part in PARTS)))
    return limited([file for file in files if file.split("/")[0] not in known], ALL_PHOTOS)


@dataclass(frozen=True, eq=False)
class Photos:
    """LFW photos of people with two or more photos, outside the calibration: ``files`` (n,), ``vectors`` (n, d)."""

    files: NDArray[np.str_]
    vectors: Float
    calibration: Calibration


@dataclass(frozen=True, eq=False)
class Planted:
    """A gallery whose template keys are rows of the photos. ``ids``: subjects by key. ``duplicates``: subjects with a
    second id. ``mislabeled``: true owner by row, None if the owner is not enrolled."""

    snapshot: Snapshot
    ids: Sequence[str]
    duplicates: frozenset[str]
    mislabeled: Mapping[int, str | None]


def main() -> None:
    options = arguments().parse_args()
    lfw = lfw_or_exit()
    figures: dict[str, Any] = {}
    packs = packs_beside_reference()
    if PULLED.is_dir():
        packs[PULLED.name] = load_pack(PULLED)
    for name, pack in packs.items():
        say(name)
        photos = photos_of(pack, lfw, options.cache)
        figures[name] = summary([judge(photos, plant(photos, seed)) for seed in SEEDS])
    figures["seconds"] = {str(n): seconds(photos.calibration, n) for n in (10_000, 100_000)}
    text = markdown(figures)
    write(RESULTS / "hygiene.md", text, figures)
    print(text)


def photos_of(
    pack: ModelPack, lfw: Path, cache: Path | None, files: Sequence[str] = (), calibrated_on: int | None = None
) -> Photos:
    """Load ``files``, by default MAX_PHOTOS of each person. A pack without calibration is calibrated on View 1's
    training list, like the bundled one, or on its first ``calibrated_on`` pairs."""
    embedder = Embedder(replace(load_pack(BUNDLED_PACK), recognition=pack.recognition), cache_dir=cache)
    chosen = list(files) or limited(several(others_than_view1(lfw)))
    embeddings = embedder.embeddings(chosen, lfw / "images")
    if pack.calibration is None:
        pairs = read_pairs(lfw / "pairsDevTrain.txt")
        listed = {*pairs.first[:calibrated_on], *pairs.second[:calibrated_on]}
        seen = embedder.embeddings(limited(sorted(listed)), lfw / "images")
        names = people_of(seen.files)[seen.found].tolist()
        evidence = calibrate(seen.vectors[seen.found], names, "LFW View 1, pairsDevTrain")
    else:
        evidence = dict(pack.calibration)
    embedder.save_cache()
    found = embeddings.found
    return Photos(np.array(chosen)[found], embeddings.vectors[found], Calibration.from_document(evidence))


def several(files: Sequence[str]) -> list[str]:
    return [file for some in by_person(files).values() if len(some) >= 2 for file in some]


def limited(files: Sequence[str], most: int = MAX_PHOTOS) -> list[str]:
    """Return the first files of each person."""
    return [file for some in by_person(files).values() for file in some[:most]]


def plant(
    photos: Photos, seed: int, people: int = PEOPLE, planted: int = PLANTED, of_strangers: int = OF_STRANGERS
) -> Planted:
    """Build a gallery of ``people`` with ``planted`` errors of each kind."""
    rng = np.random.default_rng(seed)
    owners = people_of(photos.files.tolist())
    names, counts = np.unique(owners, return_counts=True)
    drawn = rng.permutation(names[counts >= 2]).tolist()
    chosen, nobody = drawn[:people], drawn[people : people + of_strangers]
    rows = {name: rng.permutation(np.flatnonzero(owners == name))[:MAX_PHOTOS].tolist() for name in drawn}
    enrolled = {name: list(rows[name]) for name in chosen}
    duplicates = chosen[:planted]
    for name in duplicates:
        cut = int(rng.integers(1, len(rows[name])))
        enrolled[name], enrolled[name + SECOND_ID] = rows[name][:cut], rows[name][cut:]
    # Receivers and donors keep at least two correct photos each.
    hosts = chosen[planted : 2 * planted]
    donors = [name for name in chosen[2 * planted :] if len(rows[name]) >= 3][: planted - of_strangers]
    mislabeled: dict[int, str | None] = {}
    for host, owner in zip(hosts, [*donors, *nobody], strict=True):
        row = enrolled[owner].pop() if owner in enrolled else rows[owner][0]
        mislabeled[row] = owner if owner in enrolled else None
        enrolled[host].append(row)
    ids = list(enrolled)
    templates = np.array([row for name in ids for row in enrolled[name]], np.int64)
    subjects = np.array([key for key, name in enumerate(ids) for _ in enrolled[name]], np.int64)
    snapshot = Snapshot(1, templates, subjects, photos.vectors[templates], np.full(len(templates), np.nan, np.float32))
    return Planted(snapshot, ids, frozenset(duplicates), mislabeled)


def judge(photos: Photos, planted: Planted) -> dict[str, Any]:
    """Count correct and wrong findings; list the wrong ones by name."""
    report = find_problems(planted.snapshot, photos.calibration)
    findings = report.findings
    pairs = [{planted.ids[s] for s in finding.subjects} for finding in findings if finding.kind == "duplicate_subjects"]
    right = [{name, name + SECOND_ID} for name in planted.duplicates if {name, name + SECOND_ID} in pairs]
    listed = [{planted.ids[s] for s in pair.subjects} for pair in (*findings, *report.nearest)]
    strays = [(row, f) for f in findings if f.kind == "mislabeled_template" for row in f.templates]
    right_strays = {row for row, _ in strays if row in planted.mislabeled}
    homes = [
        (planted.mislabeled.get(row), None if f.belongs_to is None else planted.ids[f.belongs_to]) for row, f in strays
    ]
    return {
        "duplicates": len(right),
        "listed": sum({name, name + SECOND_ID} in listed for name in planted.duplicates),
        "expected": report.recall.value if report.recall else 0.0,
        "wrong duplicates": [" = ".join(sorted(pair)) for pair in pairs if pair not in right],
        "mislabeled": len(right_strays),
        "wrong mislabeled": [str(photos.files[row]) for row, _ in strays if row not in right_strays],
        "sent home": sum(owner is not None and owner == home for owner, home in homes),
        "to be sent home": sum(owner is not None for owner in planted.mislabeled.values()),
        "inconsistent": sum(f.kind == "inconsistent_subject" for f in findings),
        "lookalikes": sum(f.kind == "lookalikes" for f in findings),
        "planted": len(planted.duplicates),
    }


def summary(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    planted = sum(draw["planted"] for draw in draws)
    result: dict[str, Any] = {"draws": len(draws), "listed": sum(draw["listed"] for draw in draws) / planted}
    result["expected"] = sum(draw["expected"] for draw in draws) / len(draws)
    for kind in ("duplicates", "mislabeled"):
        right = sum(draw[kind] for draw in draws)
        wrong = Counter(name for draw in draws for name in draw[f"wrong {kind}"])
        own = sum(count for name, count in wrong.items() if name not in KNOWN_ERRORS)
        result[kind] = {
            "recall": right / planted,
            "precision": right / max(1, right + wrong.total()),
            "precision but for LFW": right / max(1, right + own),
            "least recall": min(draw[kind] / draw["planted"] for draw in draws),
            "least precision": min(draw[kind] / max(1, draw[kind] + len(draw[f"wrong {kind}"])) for draw in draws),
            "wrong": dict(wrong.most_common()),
        }
    result["sent home"] = sum(d["sent home"] for d in draws) / sum(d["to be sent home"] for d in draws)
    for kind in ("inconsistent", "lookalikes"):
        result[kind] = sum(draw[kind] for draw in draws) / len(draws)
    return result


def seconds(calibration: Calibration, subjects: int) -> float:
    """Measure the processor time of generated subjects of two templates each, 128 dimensions."""
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(subjects, 128)).astype(np.float32), 2, 0)
    vectors += 0.3 * rng.normal(size=vectors.shape).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pks = np.arange(2 * subjects)
    snapshot = Snapshot(1, pks, pks // 2, vectors, np.full(2 * subjects, np.nan, np.float32))
    begun = time.process_time()
    find_problems(snapshot, calibration)
    return time.process_time() - begun


def markdown(figures: Mapping[str, Any]) -> str:
    packs = {name: found for name, found in figures.items() if name != "seconds"}
    rows = []
    for name, found in packs.items():
        for kind in ("duplicates", "mislabeled"):
            part = found[kind]
            worst = [f"{part[share]:.1%} ({part[f'least {share}']:.0%})" for share in ("recall", "precision")]
            rows.append([f"{name}: {kind}", *worst, f"{part['precision but for LFW']:.1%}"])
    parts = [
        "# Hygiene\n\n`make bench-hygiene`",
        f"{PEOPLE} people of LFW with two to four photos, all outside the calibration. {PLANTED} are split under two "
        f"ids; {PLANTED} have a photo of another person, {OF_STRANGERS} of them of a stranger. {len(SEEDS)} draws; "
        "settings were chosen on other draws of the same people. The worst draw is in brackets.",
        "LFW's own errors are marked in the lists below. They were found by reviewing the reports, so the last column "
        "is the more favorable one.",
        table(" | Recall | Precision | Precision without LFW's own errors", rows),
    ]
    for name, found in packs.items():
        parts.append(
            f"{name}: the report expects to find {found['expected']:.1%} of the duplicates; it finds "
            f"{found['duplicates']['recall']:.1%}, and lists {found['listed']:.1%} with lookalikes and nearest pairs. "
            f"Of photos whose true owner is enrolled {found['sent home']:.1%} are sent there. Besides, a draw has "
            f"{found['inconsistent']:.1f} inconsistent subjects and {found['lookalikes']:.1f} lookalikes."
        )
        for kind in ("duplicates", "mislabeled"):
            wrong = [
                f"{Path(file).stem} ({', '.join(filter(None, (str(count), KNOWN_ERRORS.get(file))))})"
                for file, count in found[kind]["wrong"].items()
            ]
            parts.append(f"Counted as wrong {kind}, with the number of draws: {'; '.join(wrong) or 'none'}.")
    times = ", ".join(f"{int(n):,} subjects {value:.1f} s" for n, value in figures["seconds"].items())
    parts.append(f"Processor time for subjects of two templates, 128 dimensions: {times}.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
