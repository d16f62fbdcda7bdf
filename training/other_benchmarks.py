"""The benchmarks beside LFW, those that were named: .bin sets, IJB, and probes among distractors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alignment import Alignment, recut
from models.detection import Detector
from models.network import Float
from training.benchmarks import Embed, judge_bin, judge_distractors, judge_ijb
from training.config import DataConfig
from training.data.identities import load_identities
from training.data.verification import read_bin


def judge_others(
    embed: Embed,
    alignment: Alignment,
    detector: Detector,
    cache: Path,
    bins: Sequence[Path] = (),
    ijb: Path | None = None,
    probes: Path | None = None,
    distractors: Path | None = None,
) -> list[tuple[str, str]]:
    """Figures of the benchmarks that were named: .bin sets, an IJB folder, MegaFace's probes (a folder of photos per
    person) among distractors (another)."""

    def embed_standard(crops: NDArray[np.uint8]) -> Float:
        return embed(recut(crops, alignment))

    rows = []
    for path in bins:
        found = judge_bin(embed_standard, read_bin(path))
        rows.append((f"{path.stem} accuracy", f"{found.accuracy.mean:.2%} ± {found.accuracy.std:.2%}"))
        rows.append((f"{path.stem} TAR at FAR 0.1 %", f"{found.tar_at_far_1e3:.1%}"))
    if ijb is not None:
        templates = judge_ijb(embed, detector, ijb, alignment)
        rows += [(f"{ijb.name} TAR at FAR {far:g}", f"{tar:.2%}") for far, tar in templates.tar_at_far.items()]
        rows.append((f"{ijb.name} photos without a face", str(templates.photos_without_face)))
    if probes is not None and distractors is not None:
        looked_for, others = (
            load_identities(DataConfig(root, None, aligned=False, min_images=1), cache, detector)
            for root in (probes, distractors)
        )
        distraction = judge_distractors(embed_standard, looked_for, others.crops_NHWC)
        rows += [(f"Rank-1 among {size:,} distractors", f"{share:.2%}") for size, share in distraction.rank1.items()]
        rows += [(f"TAR at FAR {far:g} among distractors", f"{tar:.2%}") for far, tar in distraction.tar_at_far.items()]
    return rows
