"""Verifying a face against an enrolled subject: the measured FMR over the asked one, and FNMR. Now, by the gallery's
rule of fusion and its own strangers; and as it was, by the most similar template and the pack's calibration.

Subjects, templates, mated probes and strangers are drawn from LFW as bench.fusion draws them; every stranger meets
every subject. Prints, and writes bench/results/verification.md.

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
from models.gallery_risk import GalleryRisk
from models.pack import ModelPack
from models.risk import Calibration
from service.decision import KnownRisk, RiskTarget, thresholds_for
from service.gallery.evidence import impostor_evidence
from service.gallery.fusion import DEFAULT_FUSION, Fusion, scores
from service.gallery.subjects import Snapshot
from service.verification import Enrolled, compare

ASKED: Final = (0.01, 0.001, 0.0001)
FEW: Final = 30
MANY: Final = 10
NOTES: Final = f"""Measured FMR over the asked one, and FNMR: mean over {DRAWS} draws of {SUBJECTS} people of LFW and of
their templates, with the 10 % and 90 % quantiles. *Was*: the most similar template, judged by the pack's calibration,
each template a chance. The packs' calibrations are those of bench.open_set.

The second table: of {SUBJECTS} people {FEW} have {MANY} templates and all others one; FMR / asked of these {FEW} alone.
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
    """All rules are one with one template, and a search's default with more."""
    calibration = calibration_of(pack)
    lines = ["| Templates | Asked FMR | Now: FMR / asked | FNMR | Was: FMR / asked | FNMR |", "|---" * 6 + "|"]
    for count in TEMPLATES:
        draws = [draw(photos.people, count, np.random.default_rng(seed)) for seed in range(DRAWS)]
        was = KnownRisk(calibration.curve, "pack", per_subject=count)
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
    """Those who have many templates where others have one."""
    lines = ["| Fusion | " + " | ".join(f"FMR {100 * asked:g} %" for asked in ASKED) + " |", "|---" * 4 + "|"]
    draws = [uneven(photos.people, np.random.default_rng(seed)) for seed in range(DRAWS)]
    for rule in get_args(Fusion):
        found = np.stack([alarms_of_many(photos, drawn, rule, calibration_of(pack)) for drawn in draws], -1)
        lines.append(f"| `{rule}` | {' | '.join(spread(row, '', '') for row in found)} |")
    return "\n".join(lines)


def uneven(people: NDArray[np.str_], rng: np.random.Generator) -> Draw:
    """FEW subjects of MANY templates, the first; the others keep one."""
    many = draw(people, MANY, rng, FEW)
    one = draw(people, 1, rng, SUBJECTS)
    others = ~np.isin(people[one.templates], people[many.templates])
    templates = np.concatenate([many.templates, one.templates[others][: SUBJECTS - FEW]])
    subjects = np.concatenate([many.subjects, FEW + np.arange(len(templates) - len(many.subjects))])
    return Draw(templates, subjects, many.probes, many.mates, many.strangers)


def alarms_of_many(photos: Photos, drawn: Draw, rule: Fusion, calibration: Calibration) -> list[float]:
    """FMR over each of ASKED, strangers against the FEW, judged as the service judges them."""
    own = drawn.templates[drawn.subjects == 0]
    known = of_gallery(photos, drawn, rule, calibration)
    enrolled = Enrolled(photos.vectors[own], photos.qualities[own], rule, known)
    judged = compare(photos.vectors[drawn.strangers[0]], enrolled, None)
    few = drawn.subjects < FEW
    rows = drawn.templates[few]
    strangers = photos.vectors[drawn.strangers]
    fused = scores(strangers, photos.vectors[rows], drawn.subjects[few], photos.qualities[rows], rule)
    accepts = (thresholds_for(RiskTarget("fpir", asked), judged.known, 1).accept for asked in ASKED)
    return [float((fused >= accept).mean()) / asked for accept, asked in zip(accepts, ASKED, strict=True)]


def calibration_of(pack: ModelPack) -> Calibration:
    assert pack.calibration is not None  # noqa: S101 - every pack here has one
    return Calibration.from_document(pack.calibration)


def of_gallery(photos: Photos, drawn: Draw, rule: Fusion, calibration: Calibration) -> KnownRisk:
    """What a gallery of these templates knows."""
    rows = drawn.templates
    snapshot = Snapshot(0, np.arange(len(rows)), drawn.subjects, photos.vectors[rows], photos.qualities[rows])
    curve = GalleryRisk(impostor_evidence(snapshot, rule), calibration).curve
    return KnownRisk(curve, "both", usual_templates=len(rows) / len(np.unique(drawn.subjects)))


def rates(photos: Photos, drawn: Draw, rule: Fusion, known: KnownRisk) -> list[list[float]]:
    """For each of ASKED: FMR over it, and FNMR in percent."""
    enrolled = photos.vectors[drawn.templates], drawn.subjects, photos.qualities[drawn.templates]
    mated = scores(photos.vectors[drawn.probes], *enrolled, rule)[np.arange(len(drawn.probes)), drawn.mates]
    strangers = scores(photos.vectors[drawn.strangers], *enrolled, rule)
    found = []
    for asked in ASKED:
        accept = thresholds_for(RiskTarget("fpir", asked), known, 1).accept
        found.append([float((strangers >= accept).mean()) / asked, 100 * float((mated < accept).mean())])
    return found


if __name__ == "__main__":
    main()
