"""Verifying a face against an enrolled subject: the measured FMR over the asked one, and FNMR. Now, by the gallery's
rule of fusion and its own strangers; and as it was, by the most similar template and the pack's calibration.

Subjects, templates, mated probes and strangers are drawn from LFW as bench.fusion draws them; every stranger meets
every subject. Prints, and writes bench/results/verification.md.

    python -m bench.verification [--cache runs/cache]
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

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

ASKED: Final = (0.01, 0.001, 0.0001)
NOTES: Final = f"""Measured FMR over the asked one, and FNMR: mean over {DRAWS} draws of {SUBJECTS} people of LFW and of
their templates, with the 10 % and 90 % quantiles. *Was*: the most similar template, judged by the pack's calibration,
each template a chance. The packs' calibrations are those of bench.open_set.
"""


def main() -> None:
    cache, lfw = arguments().parse_args().cache, lfw_or_exit()
    text = f"# Verification against a subject\n\n`python -m bench.verification`\n\n{NOTES}"
    with TemporaryDirectory() as folder:
        packs = packs_beside_reference(lambda reference: calibrated(reference, lfw, cache, Path(folder) / "reference"))
        for pack in packs.values():
            text += f"\n## {pack.model_id}\n\n{table(pack, photos_of(pack, lfw, cache))}\n"
    write(RESULTS / "verification.md", text)
    print(text)


def table(pack: ModelPack, photos: Photos) -> str:
    assert pack.calibration is not None  # noqa: S101 - every pack here has one
    calibration = Calibration.from_document(pack.calibration)
    lines = ["| Templates | Asked FMR | Now: FMR / asked | FNMR | Was: FMR / asked | FNMR |", "|---" * 6 + "|"]
    for count in TEMPLATES:
        draws = [draw(photos.people, count, np.random.default_rng(seed)) for seed in range(DRAWS)]
        of_pack = KnownRisk(calibration.curve, "pack", per_subject=count)
        now = [rates(photos, drawn, DEFAULT_FUSION, of_gallery(photos, drawn, calibration)) for drawn in draws]
        was = [rates(photos, drawn, "max", of_pack) for drawn in draws]
        for asked, *columns in zip(ASKED, np.stack(now, -1), np.stack(was, -1), strict=True):
            cells = [spread(row, "", unit) for rows in columns for row, unit in zip(rows, ("", " %"), strict=True)]
            lines.append(f"| {count} | {100 * asked:g} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_gallery(photos: Photos, drawn: Draw, calibration: Calibration) -> KnownRisk:
    """What a gallery of these templates knows."""
    rows = drawn.templates
    snapshot = Snapshot(0, np.arange(len(rows)), drawn.subjects, photos.vectors[rows], photos.qualities[rows])
    return KnownRisk(GalleryRisk(impostor_evidence(snapshot, DEFAULT_FUSION), calibration).curve, "both")


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
