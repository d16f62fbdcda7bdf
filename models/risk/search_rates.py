"""Error rates of searches in a gallery, from known embeddings. Rates follow ISO/IEC 19795-1 and are in [0, 1]."""

from __future__ import annotations

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
