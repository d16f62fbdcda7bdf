"""Compare requested with measured FPIR on photos of many kinds, with three recognizers.

Domains and sets are those of `bench.risk_trials` and `bench.risk_photos`. Decisions are those of the service's own
functions. Prints, and writes bench/results/open_set.md and .json.

    python -m bench.open_set [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import CACHE, RESULTS, figures_table, say, table, write
from bench.machine import about, in_words
from bench.photos import PULLED, lfw_or_exit, packs_beside_reference
from bench.risk_photos import SETS, Faces, adult_groups, calibration_files, faces_of
from bench.risk_trials import DOMAINS, FPIR, Domain, Group, Outcome, draws, group_rates, judge
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.pack.writing import replace_calibration
from models.risk.calibration import Calibration
from training.evaluation.embedding import Embedder
from training.export.calibrate import calibrate

DRAWS: Final = 8
"""Galleries of each kind and size."""
SPREAD: Final = (0.1, 0.9)
JUDGED: Final = (0.1, 0.01)
"""FPIR that the goals are for."""
MEAN: Final = (0.7, 1.4)
MAX_HIGH: Final = 2.0
MIN_PEOPLE_OF_HIGH: Final = 25
MAX_DEGRADED: Final = 1.5
MAX_LOSS: Final = 0.02
MAX_PROMISE_ERROR: Final = 0.05
MIN_TEMPLATES_OF_PROMISE: Final = 2
CLEAN: Final[tuple[Group, ...]] = ("LFW", "CFP", "other collections")
SEED: Final = 1000
GROUP_SIZES: Final = (12, 25, 50, 100, 300)


@dataclass(frozen=True)
class Row:
    """All draws of one pack, domain, number of templates and people, and requested FPIR.

    ``ratio`` is the mean of measured / requested FPIR; ``low`` and ``high`` are the 10 % and 90 % quantiles. The FNIR
    are means, None without mated probes.
    """

    pack: str
    domain: str
    group: Group
    templates: int
    people: int
    fpir: float
    low: float
    ratio: float
    high: float
    fixed_fpir: float
    fnir: float | None
    hindsight_fnir: float | None
    promised_fnir: float | None

    @property
    def where(self) -> str:
        photos = "1 photo" if self.templates == 1 else f"{self.templates} photos"
        return f"{self.pack}, {self.domain}, {self.people:,} people, {photos}, {self.fpir:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two draws; writes nothing")
    count = 2 if (is_quick := parser.parse_args().quick) else DRAWS
    lfw = lfw_or_exit()
    with tempfile.TemporaryDirectory() as folder:
        packs = packs_of(lfw, Path(folder))
        sets = {name: {kind: faces_of(kind, lfw.parent, pack, CACHE) for kind in SETS} for name, pack in packs.items()}
        rows = [
            row for name in sets for row in measure(name, sets[name], calibration_of(packs[name]), DOMAINS, count, SEED)
        ]
    groups = adult_groups(lfw.parent)
    worst = [
        row
        for name in sets
        for row in worst_groups(name, sets[name]["fairface"], groups, calibration_of(packs[name]), count)
    ]
    stored = json.loads((RESULTS / "open_set.json").read_text(encoding="utf-8"))
    rows += [Row(**row) for row in stored["rows"] if row["pack"] not in sets]
    worst += [row for row in stored["groups"] if row["pack"] not in sets]
    text = f"{ratios(rows)}\n\n{GROUPS}\n\n{figures_table(worst)}\n\n{goals(rows)}"
    page = f"# Requested and measured risk\n\n`make bench-open-set`: {in_words(about())}.\n\n{NOTES}\n{text}\n"
    if not is_quick:
        figures = {**about(), "draws": count, "rows": [asdict(row) for row in rows], "groups": worst}
        write(RESULTS / "open_set.md", page, figures, indent=0)
    print(text)


# Packs


def packs_of(lfw: Path, folder: Path) -> dict[str, ModelPack]:
    """Return the bundled pack, the pulled one and the reference, without those that are absent."""
    found = packs_beside_reference(lambda reference: calibrated(reference, lfw, folder / "reference"))
    if not PULLED.is_dir():
        say(f"{PULLED.name} is left out: run kith models pull {PULLED.name}")
    pulled = {PULLED.name: load_pack(PULLED)} if PULLED.is_dir() else {}
    return {"kith-compact": found.pop("bundled"), **pulled, **found}


def calibrated(reference: Path, lfw: Path, copy: Path) -> ModelPack:
    """Return the reference models, calibrated on the people of LFW View 1's training list outside the protocol."""
    shutil.copytree(reference, copy)
    pack = load_pack(copy)
    files = calibration_files(lfw)
    vectors, seen = Embedder(pack).embed([lfw / "images" / file for file in files])
    people = [file.split("/")[0] for file, kept in zip(files, seen, strict=True) if kept]
    document = calibrate(vectors[seen], people, "LFW View 1, pairsDevTrain, without the people of the protocol")
    return replace_calibration(pack, {**document, "recognizer": pack.recognition.fingerprint()})


def calibration_of(pack: ModelPack) -> Calibration | None:
    return None if pack.calibration is None else Calibration.from_document(pack.calibration)


# Measuring


def measure(
    pack: str, sets: Mapping[str, Faces], known: Calibration | None, domains: Sequence[Domain], count: int, seed: int
) -> list[Row]:
    rows = []
    for domain in domains:
        for templates, sizes in domain.cells:
            for size in sizes:
                found: dict[float, list[Outcome]] = defaultdict(list)
                for drawn in draws(sets, domain, templates, size, count, seed):
                    for outcome in judge(drawn, known):
                        found[outcome.fpir].append(outcome)
                rows += [summary(pack, domain, outcomes) for outcomes in found.values()]
        say(f"{pack}: {domain.name}")
    return rows


def summary(pack: str, domain: Domain, outcomes: Sequence[Outcome]) -> Row:
    first = outcomes[0]
    measured = [outcome.measured_fpir / outcome.fpir for outcome in outcomes]
    low, high = np.quantile(measured, SPREAD).round(4).tolist()
    ratio = round(float(np.mean(measured)), 4)

    def mean_of(field: str) -> float | None:
        value = float(np.mean([getattr(outcome, field) for outcome in outcomes]))
        return None if math.isnan(value) else round(value, 4)

    fixed = mean_of("fixed_fpir") or 0.0
    fnirs = (mean_of("fnir"), mean_of("hindsight_fnir"), mean_of("promised_fnir"))
    drawn = (first.templates, first.people, first.fpir, low, ratio, high)
    return Row(pack, domain.name, domain.group, *drawn, fixed, *fnirs)


def worst_groups(
    pack: str, faces: Faces, groups: Mapping[str, str], known: Calibration | None, count: int
) -> list[dict[str, Any]]:
    """Return the group with most false alarms at 10 %, and its rate over the mean of groups, by size of the gallery."""
    found = []
    for size in GROUP_SIZES:
        rates = group_rates(faces, groups, known, size, JUDGED[0], range(SEED, SEED + count))
        group = max(rates, key=lambda name: rates[name])
        over = rates[group] / float(np.mean(list(rates.values())))
        found.append({"pack": pack, "people": size, "group": group, "over_mean": round(over, 4)})
    return found


# Reporting


def ratios(rows: Sequence[Row]) -> str:
    """Format one line per pack, domain, templates and people."""
    cells: dict[tuple[str, str, int, int], dict[float, Row]] = defaultdict(dict)
    for row in rows:
        cells[row.pack, row.domain, row.templates, row.people][row.fpir] = row
    return table(
        ["Pack", "Domain", "Photos", "People", *(f"{fpir:.1%}" for fpir in FPIR), "FNIR, 10 %", "FNIR, 1 %"],
        (
            [
                *(pack, domain, templates, f"{people:,}"),
                *(f"{row.ratio:.2f} ({row.low:.2f}-{row.high:.2f})" for row in cell.values()),
                *(misses(cell[fpir]) for fpir in JUDGED),
            ]
            for (pack, domain, templates, people), cell in cells.items()
        ),
    )


def misses(row: Row) -> str:
    if row.fnir is None or row.hindsight_fnir is None:
        return "-"
    promised = "-" if row.promised_fnir is None else f"{100 * row.promised_fnir:.1f}"
    return f"{100 * row.fnir:.1f} / {100 * row.hindsight_fnir:.1f} / {promised}"


def goals(rows: Sequence[Row]) -> str:
    """Format the goals, each with the rows that miss it."""
    judged = [row for row in rows if row.fpir in JUDGED]
    clean = [row for row in judged if row.group in CLEAN]
    degraded = [row for row in judged if row.group == "degraded"]
    promised = [row for row in clean if row.templates >= MIN_TEMPLATES_OF_PROMISE]
    kept = {
        "Mean of measured / requested within {} to {}".format(*MEAN): [
            (row, f"{row.ratio:.2f}", MEAN[0] <= row.ratio <= MEAN[1]) for row in clean
        ],
        f"90 % quantile at most {MAX_HIGH}, for {MIN_PEOPLE_OF_HIGH} people or more": [
            (row, f"{row.high:.2f}", row.high <= MAX_HIGH) for row in clean if row.people >= MIN_PEOPLE_OF_HIGH
        ],
        f"Degraded probes: mean at most {MAX_DEGRADED}": [
            (row, f"{row.ratio:.2f}", row.ratio <= MAX_DEGRADED) for row in degraded
        ],
        "FNIR at most 2 points above hindsight's": [
            (row, f"{100 * (row.fnir - row.hindsight_fnir):+.1f}", row.fnir <= row.hindsight_fnir + MAX_LOSS)
            for row in judged
            if row.fnir is not None and row.hindsight_fnir is not None
        ],
        "Promised FNIR within 5 points, for two photos or more": [
            (row, f"{100 * error:+.1f}", abs(error) <= MAX_PROMISE_ERROR)
            for row in promised
            if row.fnir is not None
            for error in [(row.fnir if row.promised_fnir is None else row.promised_fnir) - row.fnir]
        ],
    }
    parts = []
    for goal, found in kept.items():
        missed = [f"- {row.where}: {value}" for row, value, is_kept in found if not is_kept]
        parts += [f"**{goal}**: kept in {len(found) - len(missed)} of {len(found)}.\n", *missed, ""]
    return "\n".join(parts).strip()


GROUPS: Final = """The group with most false alarms at 10 % in mixed galleries of adults of FairFace, by its labels of
race."""
NOTES: Final = """Columns 10.0% to 0.1%: measured over requested FPIR, as the mean of the draws and the range of the
middle 80 %. At 1 the request is kept. Each draw has other enrolled people. In CFP, All-Age-Faces and FairFace it also
has other strangers, since all people are strangers who are not enrolled. Each stranger has the same weight. FNIR in %:
measured / with the threshold that hindsight sets on the raw similarities of these strangers / promised by the service.

- LFW has at most four photos of each person, CFP four frontal and two profile photos of each of 500 people. Half of
  CFP's people are enrolled, so 1 % is two or three strangers. All-Age-Faces and FairFace have one photo of each person.
- "LFW, ..." enrolls people of LFW and searches these strangers.
- Degraded: the enrolled photos are clean. Probes have faces of 32 or 24 px, a blur of 3 px, a motion of 15 px, JPEG
  quality 8, a quarter of the light, or noise of 25 gray levels. No probe is rejected for its quality.
- The bundled detector finds all faces. Photos of CFP, All-Age-Faces and FairFace are crops, padded with their edge.
- Strangers of LFW with wrong labels are left out.
- The reference recognizer is calibrated on people of LFW View 1's training list outside the open-set protocol. The
  other packs' calibrations use the whole list.
"""


if __name__ == "__main__":
    main()
