"""The benchmark of strangers counts what it says, on people whose clusters are known."""

from __future__ import annotations

import numpy as np

from bench.hygiene import Photos
from bench.strangers import clustered, markdown, summary
from models.risk.calibration import Calibration

FILES = np.array(["ada/1.jpg", "bo/1.jpg", "ada/2.jpg", "cy/1.jpg", "ada/3.jpg", "bo/2.jpg"])


def test_merges_splits_and_meetings_are_counted(calibration: Calibration) -> None:
    axes = np.eye(8, dtype=np.float32)
    # Cy looks like Bo, and Ada's third photo like nobody.
    photos = Photos(FILES, axes[[0, 1, 0, 1, 2, 1]], calibration)
    stream = clustered(photos, range(len(FILES)), 0.01)
    assert stream.owners == ["ada", "bo", "ada"]
    assert stream.first == {"new": 1, "merged": 1}
    assert stream.later == {"met": 2, "split": 1}
    found = summary([stream])
    assert (found["false merges"], found["ids per person"], found["people with one id"]) == (0.5, 1.5, 0.5)
    assert "| x | 1.0% | 50.0% |" in markdown({"x": {"0.01": found}})
