"""Check calibration without names: true FMR at its thresholds, on people whose names are known.

Run with ``python -m bench.unlabeled EMBEDDINGS``: a folder with PACK/SET.npz, each with ``vectors`` (n, d) and
``people`` (n,).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import numpy as np

from models.pack.unlabeled_photos import calibrate_faces
from models.risk.calibration import EDGES, Calibration, Ints, count_at_or_above, histogram
from models.runtime.network import Float

OUTPUT: Final = Path(__file__).parent / "results" / "unlabeled.md"
PACKS: Final = ("kith-compact", "open-model-zoo", "reference")
ALBUMS: Final = (("lfw", None), ("cfp", None), ("cfp", 100), ("cfp", 30))
RATES: Final = (1e-2, 1e-3)
MAX_FACES: Final = 5000
TITLE: Final = """# Calibration without names

True FMR of the whole set, in units of the target, at the thresholds that `kith models calibrate` chooses without names.
1 is exact, and below 1 the threshold is stricter than requested. `reference` is a stronger recognizer (MobileFaceNet).
Regenerate with `python -m bench.unlabeled EMBEDDINGS`.

| Pack | Photos | Faces | Pairs of one person | At FMR 1 % | At FMR 0.1 % |
|---|---|---|---|---|---|
"""


def impostor_counts(vectors: Float, people: np.typing.NDArray[np.str_]) -> Ints:
    """Return the (2000,) numbers of pairs of different people by score."""
    who, counts = np.unique(people, return_inverse=True)[1], histogram(np.empty(0))
    for row in range(len(vectors) - 1):
        others = vectors[row + 1 :][who[row + 1 :] != who[row]]
        counts += histogram(np.clip(others @ vectors[row], -1, 1))
    return counts


def measure(embeddings: Path, pack: str, name: str, album: int | None) -> str:
    """Return a row of the table for a set, or an album of its first people."""
    stored = np.load(embeddings / pack / f"{name}.npz")
    vectors, people = stored["vectors"][:MAX_FACES], stored["people"][:MAX_FACES]
    above = count_at_or_above(impostor_counts(vectors, people))
    if album is not None:
        chosen = np.isin(people, np.unique(people)[:album])
        vectors, people = vectors[chosen], people[chosen]
    calibration = Calibration.from_document(calibrate_faces(vectors, np.arange(len(vectors))))
    thresholds = [calibration.threshold_at_fmr(rate).similarity for rate in RATES]
    ratios = [float(np.interp(t, EDGES, above)) / above[0] / rate for t, rate in zip(thresholds, RATES, strict=True)]
    photos = np.unique(people, return_counts=True)[1]
    share = (photos * (photos - 1)).sum() / len(people) / (len(people) - 1)
    label = name.upper() + (f", {album} people" if album else "")
    return f"| `{pack}` | {label} | {len(people):,} | {share:.2%} | {ratios[0]:.2f} | {ratios[1]:.2f} |"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("embeddings", type=Path)
    embeddings = parser.parse_args().embeddings
    rows = [measure(embeddings, pack, name, album) for pack in PACKS for name, album in ALBUMS]
    OUTPUT.write_text(TITLE + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
