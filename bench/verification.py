"""Measure verification of a face against an enrolled subject: FMR over the requested one, and FNMR.

Compares the current decision, by the gallery's fusion rule and its own strangers, with the former one, by the most
similar template and the pack's calibration. Draws subjects, templates, mated probes and strangers from LFW like
bench.fusion; every stranger is compared with every subject. Prints, and writes bench/results/verification.md.

    python -m bench.verification [--cache runs/cache]
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, write
from bench.fusion import DRAWS, SUBJECTS, TEMPLATES, Draw, Photos, draw, photos_of, spread
from bench.lfw import arguments, lfw_or_exit, packs_beside_reference
from bench.open_set import calibrated
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration
from models.risk.gallery_risk import GalleryRisk
from service.domain.decision import ImpostorRisk, RiskTarget, thresholds_for
from service.domain.evidence import impostor_evidence
from service.domain.fusion import DEFAULT_FUSION, Fusion, fuse_similarities
from service.domain.gallery import Snapshot
from service.domain.verification import EnrolledSubject, compare

ASKED: Final = (0.01, 0.001, 0.0001)
FEW: Final = 30
MANY: Final = 10
NOTES: Final = f"""Measured FMR over the requested one, and FNMR: mean over {DRAWS} draws of {SUBJECTS} people of LFW
and of their templates, with the 10 % and 90 % quantiles. *Was*: the most similar template with the pack's calibration,
where each template counts as one comparison. The packs' calibrations are those of bench.open_set.

In the second table, {FEW} of {SUBJECTS} people have {MANY} templates and all others one.
FMR / asked is for these {FEW}.
"""


def main() -> None:
    cache, lfw = arguments().parse_args().cache, lfw_or_exit()
    text = f"# Verification against a subject\n\n`python -m bench.verification`\n\n{NOTES}"
    with TemporaryDirectory() as folder:
        packs = packs_beside_reference(lambda reference: calibrated(reference, lfw, cache, Path(folder) / "reference"))
        for pack in packs.values():
            photos = photos_of(pack, lfw, cache)
            text += f"\n## {pack.model_id}\n\n{table(pack, photos)}\n\n{of_many(pack, photos)}\n"
    write(RESULTS / "verification.md", text)
    print(text)


def table(pack: ModelPack, photos: Photos) -> str:
    """Tabulate the default rule of a search; with one template, all rules are the same."""
    calibration = calibration_of(pack)
    lines = ["| Templates | Asked FMR | Now: FMR / asked | FNMR | Was: FMR / asked | FNMR |", "|---" * 6 + "|"]
    for count in TEMPLATES:
        draws = [draw(photos.people, count, np.random.default_rng(seed)) for seed in range(DRAWS)]
        was = ImpostorRisk(calibration.curve, "pack", comparisons_per_subject=count)
        columns = [
            [
                rates(photos, drawn, DEFAULT_FUSION, of_gallery(photos, drawn, DEFAULT_FUSION, calibration))
                for drawn in draws
            ],
            [rates(photos, drawn, "max", was) for drawn in draws],
        ]
        for asked, *each in zip(ASKED, *(np.stack(column, -1) for column in columns), strict=True):
            cells = [spread(row, "", unit) for rows in each for row, unit in zip(rows, ("", " %"), strict=True)]
            lines.append(f"| {count} | {100 * asked:g} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_many(pack: ModelPack, photos: Photos) -> str:
    """Tabulate subjects with many templates among subjects with one."""
    lines = ["| Fusion | " + " | ".join(f"FMR {100 * asked:g} %" for asked in ASKED) + " |", "|---" * 4 + "|"]
    draws = [uneven(photos.people, np.random.default_rng(seed)) for seed in range(DRAWS)]
    for rule in get_args(Fusion):
        found = np.stack([alarms_of_many(photos, drawn, rule, calibration_of(pack)) for drawn in draws], -1)
        lines.append(f"| `{rule}` | {' | '.join(spread(row, '', '') for row in found)} |")
    return "\n".join(lines)


def uneven(people: NDArray[np.str_], rng: np.random.Generator) -> Draw:
    """Draw a gallery that starts with FEW subjects of MANY templates each; the others have one."""
    many = draw(people, MANY, rng, FEW)
    one = draw(people, 1, rng, SUBJECTS)
    others = ~np.isin(people[one.templates], people[many.templates])
    templates = np.concatenate([many.templates, one.templates[others][: SUBJECTS - FEW]])
    subjects = np.concatenate([many.subjects, FEW + np.arange(len(templates) - len(many.subjects))])
    return Draw(templates, subjects, many.probes, many.mates, many.strangers)


def alarms_of_many(photos: Photos, drawn: Draw, rule: Fusion, calibration: Calibration) -> list[float]:
    """Return FMR over each of ASKED, strangers against the FEW, decided like the service."""
    own = drawn.templates[drawn.subjects == 0]
    known = of_gallery(photos, drawn, rule, calibration)
    enrolled = EnrolledSubject(photos.vectors[own], photos.qualities[own], rule, known)
    judged = compare(photos.vectors[drawn.strangers[0]], enrolled, None)
    few = drawn.subjects < FEW
    rows = drawn.templates[few]
    strangers = photos.vectors[drawn.strangers]
    fused = fuse_similarities(strangers, photos.vectors[rows], drawn.subjects[few], photos.qualities[rows], rule)
    accepts = (thresholds_for(RiskTarget("fpir", asked), judged.known, 1).accept for asked in ASKED)
    return [float((fused >= accept).mean()) / asked for accept, asked in zip(accepts, ASKED, strict=True)]


def calibration_of(pack: ModelPack) -> Calibration:
    assert pack.calibration is not None  # noqa: S101 - every pack here has one
    return Calibration.from_document(pack.calibration)


def of_gallery(photos: Photos, drawn: Draw, rule: Fusion, calibration: Calibration) -> ImpostorRisk:
    """Return the impostor risk of a gallery with these templates."""
    rows = drawn.templates
    snapshot = Snapshot(0, np.arange(len(rows)), drawn.subjects, photos.vectors[rows], photos.qualities[rows])
    curve = GalleryRisk(impostor_evidence(snapshot, rule), calibration).raw_curve
    return ImpostorRisk(curve, "both", mean_templates=len(rows) / len(np.unique(drawn.subjects)))


def rates(photos: Photos, drawn: Draw, rule: Fusion, known: ImpostorRisk) -> list[list[float]]:
    """Return, for each of ASKED, FMR over it, and FNMR in percent."""
    enrolled = photos.vectors[drawn.templates], drawn.subjects, photos.qualities[drawn.templates]
    mated = fuse_similarities(photos.vectors[drawn.probes], *enrolled, rule)[np.arange(len(drawn.probes)), drawn.mates]
    strangers = fuse_similarities(photos.vectors[drawn.strangers], *enrolled, rule)
    found = []
    for asked in ASKED:
        accept = thresholds_for(RiskTarget("fpir", asked), known, 1).accept
        found.append([float((strangers >= accept).mean()) / asked, 100 * float((mated < accept).mean())])
    return found


if __name__ == "__main__":
    main()
