"""Choice of the face that a photo of one person is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from models.runtime.network import Float
from models.vision.detection import box_areas
from models.vision.quality import Quality, QualityGate

MIN_SIZE_RATIO: Final = 0.75
"""Sides of a box, as a share of the main face's, from which a face is as large. Chosen on LFW View 1, of whose photos
19.6 % show further faces: 2.4 % show one as large and as sharp, and in 0.04 % the main face is of someone else."""
MIN_SHARPNESS_RATIO: Final = 0.5
"""Share of the main face's sharpness from which a face is as sharp."""


def find_main_face(
    boxes_xyxy: Float, scores: Float, qualities: Sequence[Quality], gate: QualityGate, confident_score: float
) -> tuple[int, bool]:
    """Return the row of the main face, and whether another face rivals it.

    The main face is the largest usable one, among the faces with at least ``confident_score``, or among all if none has
    it. A rival is as sharp and, if it is usable and confident, as large; else larger. A larger face that is confident
    and as sharp, but not usable, such as a profile, is itself the main face: its quality is what the photo lacks.

    Args:
        boxes_xyxy: (n, 4) boxes, n > 0.
        scores: (n,) detection scores.
        qualities: qualities of the n faces.
        gate: limits of usable quality.
    """
    sides, sharpness = np.sqrt(box_areas(boxes_xyxy)), np.array([each.sharpness for each in qualities])
    usable = np.array([not gate.reasons(each) for each in qualities])
    sure = scores >= confident_score
    if not sure.any():
        sure = np.ones(len(scores), bool)
    fit = sure & usable if (sure & usable).any() else sure
    main = int(np.where(fit, sides, -1).argmax())
    as_sharp = sharpness >= MIN_SHARPNESS_RATIO * sharpness[main]
    if (unfit := as_sharp & sure & ~usable & (sides > sides[main])).any():
        return int(np.where(unfit, sides, -1).argmax()), False
    rivals = as_sharp & usable & np.where(sure, sides >= MIN_SIZE_RATIO * sides[main], sides > sides[main])
    rivals[main] = False
    return main, bool(rivals.any())
