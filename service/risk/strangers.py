"""Online clustering of unknown faces: which remembered stranger a face matches. Pure.

A face is compared with N remembered strangers as a probe with N subjects (:mod:`service.risk.decision`): at
the gallery's accepted risk. So a new stranger is taken for one of them at that rate, however many they
are, if the risk is an FPIR.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.runtime.network import Float
from service.domain.gallery import GallerySettings
from service.domain.strangers import MAX_TEMPLATES, Nearest, Recalled
from service.risk.threshold import ImpostorRisk, thresholds_for


def recall(vector: Float, nearest: Nearest | None, model: ImpostorRisk | None, settings: GallerySettings) -> Recalled:
    """Compare the (d,) unit vector of a face with the nearest stranger; None: there are no strangers.

    ``model``: risk of the gallery's searches. Raises RiskUncalibratedError as :func:`thresholds_for`.
    """
    if nearest is None:
        return "new"
    # Similarities are not adjusted to a rival: the runner-up is often the same person with another id.
    among = None if model is None else replace(model.against(nearest.mean_templates), search=None)
    thresholds = thresholds_for(settings.risk, among, nearest.strangers, settings.review_factor)
    if nearest.similarity < thresholds.review:
        return "new"
    if nearest.similarity < thresholds.accept:
        return "unclear"
    return "diverse" if _is_diverse(vector, nearest, model) else "met"


def _is_diverse(vector: Float, nearest: Nearest, model: ImpostorRisk | None) -> bool:
    """Return whether a face is less similar to all templates than two photos of one person are on average."""
    if model is None or model.pack is None:
        return False
    own = nearest.own()
    return len(own) < MAX_TEMPLATES and float(np.max(own @ vector)) < model.pack.mean_genuine
