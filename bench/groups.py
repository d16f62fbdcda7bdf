"""Measure who is confused and who is missed: error rates by age, gender, race, pose and mask.

All rates use one threshold per pack: the cosine of an FMR of 0.1 % in its calibration. FPIR are those of galleries
whose thresholds the service derives. Writes bench/results/groups.json and .md, in which other packs keep their figures.

    python -m bench.groups [--packs NAME...] [--cache runs/cache] [--card]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import RESULTS, outside, say, table, write
from bench.group_photos import (
    CROSSING,
    SAME_PERSON,
    CropEmbedder,
    Photos,
    calibration_of,
    crops_of,
    faces,
    first_share,
    lfw,
    subset,
)
from bench.group_rates import Estimate, FalseMatches, share
from bench.photos import PULLED, arguments, lfw_or_exit
from bench.risk_photos import read_crops, rows_of
from bench.risk_trials import identified, risk_of, search
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.risk.search_rates import threshold_at_fpir
from service.domain.gallery import Snapshot
from service.domain.outcomes import RiskTarget
from service.risk.decision import thresholds_for
from training.evaluation.metrics import Bools, Floats, Ints
from training.export.model_card import MASKED_PHOTOS, PLAIN_PHOTOS
from training.export.packing import store_group_figures

FMR: Final = 0.001
FPIR: Final = 0.01
PHOTOS_OF_ONE: Final = 4
"""Photos of one person of RWMFD."""
PAIRS_OF_ONE: Final = 2
"""Pairs of one person of CFP, of each view."""
MIN_STRANGERS: Final = 0.5
"""Least number of people who are not enrolled, for each who is."""


@dataclass(frozen=True)
class Protocol:
    """Size of the measurement. ``share``: of each collection, in (0, 1]."""

    enrolled: int = 300
    draws: int = 8
    rounds: int = 500
    share: float = 1


@dataclass(frozen=True)
class GroupRow:
    """FMR within a group, as [value, low, high], its ratio to that of the collection, and the FMR ``across``, between
    the group and all others of its kind.

    Attributes:
        fpir: of the group's strangers, as [mean, least, largest] of the draws, by enrolled people: ``LFW``, people of
            the same collection (``all``), and of the same group (``own``).
        own_fnmr: FNMR of LFW's people at the threshold that keeps the FPIR in the group's own galleries, and its ratio
            to that of galleries of the whole collection.
        warned: share of the group's own galleries with the warning ``people_unlike_calibration``.
    """

    collection: str
    kind: str
    group: str
    people: int
    fmr: list[float]
    ratio: list[float]
    across: list[float]
    fpir: dict[str, list[float]]
    own_fnmr: float | None = None
    own_fnmr_ratio: float | None = None
    warned: float | None = None


@dataclass(frozen=True)
class MissRow:
    """FNMR and FMR of a kind of photo pair, as [value, low, high]; None if no person has two photos."""

    photos: str
    people: int
    pairs: int
    fnmr: list[float] | None
    fmr: list[float]


def main() -> None:
    parser = arguments()
    present = [str(folder) for folder in (PULLED, outside("KITH_REFERENCE", "reference")) if folder.is_dir()]
    default = [*present, "kith-compact"]
    parser.add_argument("--packs", nargs="+", help="kith-compact, or folders of packs", default=default)
    parser.add_argument("--share", type=float, default=1, help="share of each collection, for a shorter run")
    parser.add_argument("--card", action="store_true", help="update the packs' manifests and model cards")
    options = parser.parse_args()
    path = RESULTS / "groups.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in options.packs:
        pack = load_pack(BUNDLED_PACK if name == "kith-compact" else Path(name))
        figures[pack.model_id] = measure(pack, lfw_or_exit().parent, options.cache, Protocol(share=options.share))
        if options.card:
            store_group_figures(pack.directory, figures[pack.model_id])
        write(path.with_suffix(".md"), page(figures), figures, indent=0)
    print(page(figures))


def measure(pack: ModelPack, data: Path, cache: Path, protocol: Protocol) -> dict[str, Any]:
    """Return all figures of a pack as a JSON document."""
    embedder = CropEmbedder(pack, cache)
    known = calibration_of(pack, data, embedder)
    threshold = known.threshold_at_fmr(FMR).score
    people = lfw(data, embedder, protocol.share)
    embedder.save()
    misses = [
        *lfw_misses(people, threshold, protocol),
        *mask_misses(data, embedder, people, threshold, protocol),
        *cfp_misses(data, embedder, threshold, protocol),
    ]
    reference, judge, groups = outside("KITH_REFERENCE", "reference"), None, list[GroupRow]()
    if reference.is_dir():
        judging = load_pack(reference)
        same = judging.recognition.fingerprint() == pack.recognition.fingerprint()
        judge = embedder if same else CropEmbedder(judging, cache)
    for name in ("FairFace", "All-Age-Faces"):
        photos = faces(data, name, embedder, judge, protocol.share)
        for used in filter(None, (embedder, judge)):
            used.save()
        say(f"{pack.model_id}: {name}: {len(photos.people)} photos")
        groups += group_rows(name, photos, people, known, threshold, protocol)
    return {
        "recognizer": pack.recognition.fingerprint(),
        "share": protocol.share,
        "threshold": round(threshold, 4),
        "misses": [asdict(row) for row in misses],
        "groups": [asdict(row) for row in groups],
    }


# Misses


def lfw_misses(photos: Photos, threshold: float, protocol: Protocol) -> list[MissRow]:
    """Return the rates of pairs of LFW without a mask, with one, and with two."""
    matches = FalseMatches(photos.vectors, photos.people, threshold, protocol.rounds)
    view = photos.labels["photo"]
    return [
        miss_row(name, photos, np.flatnonzero(view == first), np.flatnonzero(view == second), matches)
        for name, first, second in (
            (PLAIN_PHOTOS, "first", "second"),
            (MASKED_PHOTOS, "first", "second, masked"),
            ("LFW, both photos with a drawn mask", "first, masked", "second, masked"),
        )
    ]


def miss_row(name: str, photos: Photos, first: Ints, second: Ints, matches: FalseMatches) -> MissRow:
    """Return FNMR of the pairs (first[i], second[i]) of one person, and FMR between both kinds of photo."""
    similarities = np.einsum("nd,nd->n", photos.vectors[first], photos.vectors[second])
    missed = share(similarities < matches.threshold, photos.people[first], matches.rounds)
    kinds = [np.isin(np.arange(len(photos.people)), rows) for rows in (first, second)]
    count = len(np.unique(photos.people[first]))
    return MissRow(name, count, len(first), rounded(missed), rounded(matches.rate(*kinds)))


def mask_misses(
    data: Path, embedder: CropEmbedder, unmasked: Photos, threshold: float, protocol: Protocol
) -> list[MissRow]:
    """Return the rates of photos of real masks: of RWMFD's pairs, and of all of them against LFW without masks."""
    rows, crops = crops_of(data, lambda row: row.get("mask") == "1", protocol.share)
    plain = subset(unmasked, unmasked.labels["photo"] == "first")
    names = np.array([f"{row['set']}-{row.get('id', row['row'])}" for row in rows])
    vectors = np.concatenate([embedder.embed(crops), plain.vectors])
    photos = Photos(vectors, np.concatenate([names, plain.people]), {})
    matches = FalseMatches(photos.vectors, photos.people, threshold, protocol.rounds)
    named = np.flatnonzero(np.char.startswith(photos.people, "rwmfd-"))
    pairs = [
        pair
        for person in np.unique(photos.people[named]).tolist()
        for pair in combinations(named[photos.people[named] == person][:PHOTOS_OF_ONE].tolist(), 2)
    ]
    is_masked = np.arange(len(photos.people)) < len(names)
    rate = rounded(matches.rate(is_masked, ~is_masked))
    against = MissRow("real mask with LFW", len(np.unique(names)), 0, None, rate)
    if not pairs:
        return [against]
    first, second = np.array(pairs).T
    return [miss_row("RWMFD, both photos with a real mask", photos, first, second, matches), against]


def cfp_misses(data: Path, embedder: CropEmbedder, threshold: float, protocol: Protocol) -> list[MissRow]:
    """Return the rates of CFP's same-person pairs, frontal with frontal and frontal with profile."""
    mated: dict[str, list[dict[str, str]]] = {}
    for view, name in (("frontal", "pairs_FF.csv"), ("profile", "pairs_FP.csv")):
        of_person: dict[str, list[dict[str, str]]] = {}
        for row in rows_of(data / "cfp" / name):
            if row["same"] == "1" and row["file_b"]:
                of_person.setdefault(row["original_a"].split("/")[0], []).append(row)
        chosen = [of_person[person][:PAIRS_OF_ONE] for person in first_share(sorted(of_person), protocol.share)]
        mated[view] = [row for rows in chosen for row in rows]
    names = {row[f"file_{end}"]: row[f"original_{end}"] for rows in mated.values() for row in rows for end in "ab"}
    crops = read_crops(data / "cfp" / "cfp.tar", set(names))
    files = sorted(names)
    people = np.array([f"cfp-{names[file].split('/')[0]}" for file in files])
    photos = Photos(embedder.embed(np.stack([crops[file] for file in files])), people, {})
    matches = FalseMatches(photos.vectors, photos.people, threshold, protocol.rounds)
    row_of = {file: row for row, file in enumerate(files)}
    found = []
    for view, rows in mated.items():
        first, second = (np.array([row_of[row[f"file_{end}"]] for row in rows]) for end in "ab")
        found.append(miss_row(f"CFP, frontal with {view}", photos, first, second, matches))
    return found


# Groups


def group_rows(
    collection: str, photos: Photos, mates: Photos, known: Calibration, threshold: float, protocol: Protocol
) -> list[GroupRow]:
    """Return the rates of a collection and of its groups. ``mates``: result of `lfw`."""
    matches = FalseMatches(photos.vectors, photos.people, threshold, protocol.rounds)
    everyone = np.ones(len(photos.people), bool)
    first, second = (subset(mates, mates.labels["photo"] == name) for name in ("first", "second"))
    mated = np.einsum("nd,nd->n", first.vectors, second.vectors).astype(np.float64)
    of_lfw = searched(first, photos, known, protocol)
    mixed = searched(photos, photos, known, protocol)
    overall = matches.rate(everyone)
    rows = []
    for kind, name, chosen in (("", "all", everyone), *photos.groups()):
        within, some = matches.rate(chosen), subset(photos, chosen)
        others = ~chosen & (photos.labels[kind] != "") if kind else chosen
        own = searched(some, some, known, protocol) if kind not in ("", CROSSING) else mixed if not kind else None
        fmr, ratio, across = map(rounded, (within, within.over(overall), matches.rate(chosen, others)))
        fpir = {title: found.fpir(chosen) for title, found in (("LFW", of_lfw), ("all", mixed)) if found is not None}
        row = GroupRow(collection, kind, name, len(some.people), fmr, ratio, across, fpir)
        if own is not None and mixed is not None:
            row.fpir["own"] = own.fpir(np.ones(len(some.people), bool))
            fnmr, usual = own.fnmr(mated), mixed.fnmr(mated)
            row = replace(row, own_fnmr=round(fnmr, 4), own_fnmr_ratio=round(fnmr / usual, 2), warned=own.warned)
        rows.append(row)
    return rows


@dataclass(frozen=True, eq=False)
class Searched:
    """Strangers searched in drawn galleries: (draws, n) ``alarms``, 1 if the service identifies the stranger, and the
    ``best`` similarity, both NaN for the enrolled; and the share of galleries unlike the calibration."""

    alarms: Floats
    best: Floats
    warned: float

    def fpir(self, chosen: Bools) -> list[float]:
        """Return mean, least and largest FPIR of the draws."""
        rates = np.nanmean(self.alarms[:, chosen], 1)
        return [round(float(value), 5) for value in (rates.mean(), rates.min(), rates.max())]

    def fnmr(self, mated: Floats) -> float:
        """Return the mean FNMR of same-person similarities at the lowest threshold of each draw that keeps the FPIR."""
        thresholds = [threshold_at_fpir(best[~np.isnan(best)], FPIR) for best in self.best]
        return float(np.mean([(mated < threshold).mean() for threshold in thresholds]))


def searched(enrolled: Photos, probes: Photos, known: Calibration, protocol: Protocol) -> Searched | None:
    """Enroll one photo of random people, and search for all probes of others; None for too few people."""
    people, rows = np.unique(enrolled.people, return_index=True)
    if len(people) < protocol.enrolled * (1 + (MIN_STRANGERS if probes is enrolled else 0)):
        return None
    alarms, best, warned = [], [], []
    for number in range(protocol.draws):
        drawn = np.random.default_rng((number, len(people))).permutation(len(people))[: protocol.enrolled]
        subjects = np.arange(protocol.enrolled)
        vectors = enrolled.vectors[rows[drawn]]
        snapshot = Snapshot(len(subjects), subjects, subjects, vectors, np.ones(len(subjects), np.float32))
        risk, impostor = risk_of(snapshot, known)
        found = search(snapshot, probes.vectors)
        named = identified(found, thresholds_for(RiskTarget("fpir", FPIR), impostor, len(subjects)))
        stranger = ~np.isin(probes.people, people[drawn])
        alarms.append(np.where(stranger, named, np.nan))
        best.append(np.where(stranger, found.similarities[:, 0], np.nan))
        warned.append(risk.is_unlike_pack())
    return Searched(np.stack(alarms), np.stack(best), float(np.mean(warned)))


def rounded(estimate: Estimate) -> list[float]:
    """Return value and interval, with four significant digits."""
    return [float(f"{value:.4g}") for value in (estimate.value, *estimate.interval())]


# Reporting


def page(figures: Mapping[str, Any]) -> str:
    parts = [
        "# Who is confused, who is missed\n\n`python -m bench.groups`\n",
        NOTES,
        f"## Summary\n\n{summary(figures)}\n",
    ]
    for name, found in figures.items():
        title = f"## {name}, threshold {found['threshold']:.3f}, {found['share']:.0%} of each collection"
        parts.append(f"{title}\n\n{miss_table(found)}\n\n{group_table(found)}\n")
    return "\n".join(parts)


def summary(figures: Mapping[str, Any]) -> str:
    """Return the short table: FNMR by kind of photo, and FMR by group, of all packs."""
    packs = sorted(figures, key=lambda name: (name != BUNDLED_PACK.name, name))
    misses = [{row["photos"]: row for row in figures[name]["misses"]} for name in packs]
    rows = [
        [f"Missed (FNMR): {photos}", *(f"{found[photos]['fnmr'][0]:.1%}" for found in misses)]
        for photos in misses[0]
        if all(found.get(photos, {}).get("fnmr") for found in misses)
    ]
    groups = [{(row["collection"], row["group"]): row for row in figures[name]["groups"]} for name in packs]
    for title, keys in SUMMARY_GROUPS.items():
        found = [[of_pack[key]["fmr"][0] for key in keys if key in of_pack] for of_pack in groups]
        if all(found):
            ends = [(f"{min(rates):.2%}", f"{max(rates):.2%}") for rates in found]
            rows.append([f"Confused (FMR): {title}", *(a if a == b else f"{a} to {b}" for a, b in ends)])
    return table(["At the cosine of an FMR of 0.1 % on LFW", *(f"`{name}`" for name in packs)], rows)


def miss_table(found: Mapping[str, Any]) -> str:
    rows = [
        [
            row["photos"],
            f"{row['people']:,}",
            f"{row['pairs']:,}" if row["pairs"] else "-",
            percent(row["fnmr"]),
            percent(row["fmr"]),
        ]
        for row in found["misses"]
    ]
    return table("Photos | People | Pairs of one person | FNMR, % | FMR, %", rows)


def group_table(found: Mapping[str, Any]) -> str:
    rows = []
    for row in found["groups"]:
        cells = [row["collection"], row["group"], f"{row['people']:,}", percent(row["fmr"])]
        cells += ["{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]), percent(row["across"])]
        cells += [percent(row["fpir"].get(gallery)) for gallery in ("LFW", "all", "own")]
        if row["own_fnmr"] is None:
            cells += ["-", "-", "-"]
        else:
            cells += [f"{row['warned']:.0%}", f"{100 * row['own_fnmr']:.1f}", f"{row['own_fnmr_ratio']:.2f}"]
        rows.append(cells)
    rates = "FMR within, % | over all | FMR to others, % | FPIR, LFW enrolled, % | all enrolled | own group enrolled"
    return table(f"Collection | Group | People | {rates} | warned | FNMR at own threshold, % | over all", rows)


def percent(rate: Sequence[float] | None) -> str:
    """Format a rate and its interval."""
    if rate is None:
        return "-"
    digits = 3 if rate[0] < 0.01 else 1
    value, low, high = (f"{100 * one:.{digits}f}" for one in rate)
    return f"{value} ({low} to {high})"


RACES: Final = ("Black", "East Asian", "Indian", "Latino or Hispanic", "Middle Eastern", "Southeast Asian", "White")
SUMMARY_GROUPS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "two people of FairFace": [("FairFace", "all")],
    "two people of one race, by race": [("FairFace", race) for race in RACES],
    "two women, two men": [("FairFace", "Female"), ("FairFace", "Male")],
    "two people of 60 or older": [("FairFace", "60 and over")],
    "**two children** of 3 to 9": [("FairFace", "3-9")],
    "**two infants** to 2": [("FairFace", "0-2")],
    "**two children** to 12, All-Age-Faces": [("All-Age-Faces", "2-12")],
}
NOTES: Final = f"""All rates are at one threshold per pack: the cosine of an FMR of {FMR:.1%} in its calibration, from
people of LFW's View 1 (adults, press photos). Intervals are 95 %, over people; those of FPIR are ranges of the draws.

- FairFace and All-Age-Faces have one photo of each person, so neither FNMR nor FNIR of their groups can be measured.
  FairFace labels race, not skin tone. Labels are annotators' guesses. Photos to which the reference recognizer gives
  a cosine of {SAME_PERSON} or more count as one person. One chain of such
  pairs joins 186 photos of FairFace, whose own comparisons are left out.
  LFW and CFP have no labels of age, gender or race.
- FMR within: two people of the group. Over all: divided by the FMR of the collection. To others: a person of the group
  and one of another group of the same kind.
- FPIR: galleries of 300 people with one photo, at a promised FPIR of {FPIR:.0%}; strangers are of the group. Warned:
  share of the group's galleries whose risk report has `people_unlike_calibration`.
- FNMR at own threshold: of LFW's pairs at the threshold that keeps the FPIR in the group's galleries, and divided by
  that of galleries of the whole collection. It is what the group's impostors cost if its mates are like LFW's, and
  not its FNIR.
- Drawn masks cover aligned crops: real masks also move landmarks, and the detector misses some. RWMFD has 21 people,
  up to {PHOTOS_OF_ONE} photos each, whose names are unchecked.
- All crops are aligned by YuNet's landmarks, LFW's included. Photos in which no face was found are missing.
"""


if __name__ == "__main__":
    main()
