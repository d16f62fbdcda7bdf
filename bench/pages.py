"""Measure whole-photo decisions on composed pages of LFW's faces: face by face, and one face per person.

A page has photos of KNOWN enrolled people and of as many strangers: at random, or those most like enrolled people who
are on the page, or who are not. Galleries are those of `bench.risk_trials`. FPIR is the share of strangers who are
named. Prints, and writes bench/results/pages.md and .json.

    python -m bench.pages [--draws 8] [--cache runs/cache]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bench.common import RESULTS, table, write
from bench.photos import arguments, lfw_or_exit
from bench.risk_photos import faces_of
from bench.risk_trials import DOMAINS, FPIR, Draw, draws, risk_of
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.calibration import Calibration
from models.runtime.network import Float
from service.domain.outcomes import RiskTarget
from service.risk.decision import ImpostorRisk, decide, score_candidates, thresholds_for
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification
from training.evaluation.metrics import Ints

PEOPLE: Final = 300
KNOWN: Final = 4
NEAREST: Final = 5
STRANGER: Final = -1
STRANGERS: Final = ("at random", "like people on the page", "like other enrolled people")


def main() -> None:
    parser = arguments()
    parser.add_argument("--draws", type=int, default=8, help="galleries")
    options = parser.parse_args()
    pack, lfw = load_pack(BUNDLED_PACK), lfw_or_exit()
    if pack.calibration is None:
        raise SystemExit("the bundled pack has no calibration")
    sets, known = {"lfw": faces_of("lfw", lfw.parent, pack, options.cache)}, Calibration.from_document(pack.calibration)
    counts = {(kind, fpir): Counter[str]() for kind in STRANGERS for fpir in FPIR}
    for number, draw in enumerate(draws(sets, DOMAINS[0], 1, PEOPLE, options.draws, 1000)):
        _, model = risk_of(draw.snapshot, known)
        rng = np.random.default_rng(number)
        for kind in STRANGERS:
            for probes, owners in pages(draw, kind, rng):
                for fpir in FPIR:
                    counts[kind, fpir] += judge(draw, model, fpir, probes, owners)
    figures = [{"strangers": kind, "asked": fpir, **found} for (kind, fpir), found in counts.items()]
    text = markdown(figures, options.draws)
    write(RESULTS / "pages.md", text, figures)
    print(text)


def pages(draw: Draw, kind: str, rng: np.random.Generator) -> list[tuple[Float, Ints]]:
    """Return pages: vectors of KNOWN people and of as many strangers, and the subjects they show.

    Each probe of an enrolled person is on one page, with people who are not on it yet.
    """
    found = []
    left = list(rng.permutation(len(draw.mated)))
    while len({int(draw.mates[row]) for row in left}) >= KNOWN:
        chosen: dict[int, int] = {}
        for row in left:
            if len(chosen) < KNOWN:
                chosen.setdefault(int(draw.mates[row]), row)
        rows = list(chosen.values())
        taken = set(rows)
        left = [row for row in left if row not in taken]
        if kind == "at random":
            others = rng.choice(len(draw.strangers), KNOWN, replace=False)
        else:
            absent = np.setdiff1d(np.arange(PEOPLE), list(chosen))
            alike = list(chosen) if kind == "like people on the page" else rng.choice(absent, KNOWN, replace=False)
            others = np.argmax(draw.snapshot.vectors[alike] @ draw.strangers.T, axis=1)
        probes = np.concatenate([draw.mated[rows], draw.strangers[others]])
        found.append((probes, np.array([*chosen, *[STRANGER] * KNOWN])))
    return found


def judge(draw: Draw, model: ImpostorRisk, fpir: float, probes: Float, owners: Ints) -> Counter[str]:
    """Count right names, wrong names and named strangers of a page, before and after the joint decision."""
    thresholds = thresholds_for(RiskTarget("fpir", fpir), model, PEOPLE)
    answers = []
    for row in probes @ draw.snapshot.vectors.T:
        hits = [(int(i), float(row[i])) for i in np.argsort(-row)[:NEAREST]]
        ranked = score_candidates(hits, thresholds, model, PEOPLE)
        answers.append(Identification(decide(ranked, thresholds), ranked, thresholds, model, PEOPLE, ranked=ranked))
    counts = Counter({"known": KNOWN, "unknown": KNOWN})
    for when, decided in (("before", answers), ("after", one_face_per_person(answers, probes))):
        for owner, answer in zip(owners.tolist(), decided, strict=True):
            if answer.decision.outcome == "identified" and answer.decision.best is not None:
                named = answer.decision.best.subject_pk
                kind = "named" if owner == STRANGER else "right" if named == owner else "wrong"
                counts[f"{kind} {when}"] += 1
    return counts


def markdown(figures: Sequence[dict[str, Any]], galleries: int) -> str:
    rows = []
    for row in figures:
        named = [f"{row.get(f'named {when}', 0) / row['unknown']:.2%}" for when in ("before", "after")]
        names = [f"{row.get(f'{kind} {when}', 0):,}" for kind in ("right", "wrong") for when in ("before", "after")]
        rows.append([row["strangers"], f"{row['asked']:.1%}", *named, f"{row['known']:,}", *names])
    return f"""# Pages of several faces

`python -m bench.pages`

Pages of {KNOWN} enrolled people and {KNOWN} strangers, composed of LFW's faces; {galleries} galleries of {PEOPLE}
people with one photo each, bundled pack. *alone*: face by face; *jointly*: one face per person. The FPIR is promised
for strangers at random. Those most like enrolled people are the hardest: the joint decision helps where the person they
are like is on the page too, and cannot help elsewhere.

{table("Strangers | FPIR asked | alone | jointly | Known faces | Right alone | jointly | Wrong alone | jointly", rows)}
"""


if __name__ == "__main__":
    main()
