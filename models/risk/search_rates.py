"""Error rates of searches in a gallery, from known embeddings. Rates follow ISO/IEC 19795-1 and are in [0, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.risk.calibration import Floats, Ints


def search_gallery(gallery: Floats, mated: Floats, mates: Ints, strangers: Floats) -> tuple[Floats, Floats]:
    """Search a gallery of (G, d) unit vectors with (m, d) mated probes and (s, d) strangers.

    Args:
        mates: (m,) row of each mated probe's mate in the gallery.

    Returns:
        ``hits`` (m,): similarity of each mated probe to its mate if the mate is the first candidate, else -inf.
        ``alarms`` (s,): similarity of the first candidate of each stranger.
    """
    scores = mated @ gallery.T
    hits = np.where(scores.argmax(1) == mates, scores.max(1), -np.inf)
    return hits, (strangers @ gallery.T).max(1)


def threshold_at_fpir(alarms: Floats, fpir: float) -> float:
    """Return the lowest threshold reached by at most ``fpir`` (in [0, 1)) of the strangers' searches."""
    return float(np.nextafter(np.sort(alarms)[::-1][int(fpir * len(alarms))], 2.0))


def rates_at(
    gallery: Floats,
    mated: Floats,
    mates: Ints,
    strangers: Floats,
    *,
    pair_threshold: float,
    search_threshold: float,
    fpir: float,
) -> dict[str, Any]:
    """Return TAR and FMR at one threshold, and FNIR and FPIR at another, for the arguments of `search_gallery`.

    ``fnir_by_hindsight`` is the FNIR at the threshold of exactly ``fpir`` among these strangers.
    """
    similarity = mated @ gallery.T
    own = np.zeros(similarity.shape, bool)
    own[np.arange(len(mates)), mates] = True
    impostors = np.concatenate([similarity[~own], (strangers @ gallery.T).ravel()])
    hits, alarms = search_gallery(gallery, mated, mates, strangers)
    return {
        "tar": float((similarity[own] >= pair_threshold).mean()),
        "fmr": float((impostors >= pair_threshold).mean()),
        "fnir": float(1 - (hits >= search_threshold).mean()),
        "fpir": float((alarms >= search_threshold).mean()),
        "fpir_asked": fpir,
        "fnir_by_hindsight": float(1 - (hits >= threshold_at_fpir(alarms, fpir)).mean()),
    }
