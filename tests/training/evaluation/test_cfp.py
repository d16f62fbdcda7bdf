"""CFP's lists and crops: photos without a face count as not recognized, gaps are reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.evaluation.cfp_files import write_cfp
from training.config import ConfigError
from training.evaluation.cfp import embed_cfp, load_cfp_crops
from training.evaluation.lfw import verify_similarities


def mean_color(crops: np.ndarray) -> np.ndarray:
    centered = crops.reshape(len(crops), -1, 3).mean(1) - 127.5
    return np.asarray(centered / np.linalg.norm(centered, axis=1, keepdims=True), np.float32)


def test_pairs_are_judged_by_their_crops(tmp_path: Path) -> None:
    root = write_cfp(tmp_path / "cfp")
    crops = load_cfp_crops(root, tmp_path / "cache")
    embedded = embed_cfp(mean_color, crops)
    frontal, profile = crops.pairs["CFP-FF"], crops.pairs["CFP-FP"]
    assert verify_similarities(embedded.similarities(frontal), frontal.same, frontal.folds).accuracy.mean == 1
    similarities = embedded.similarities(profile)
    missing = profile.second.index("")
    assert similarities[missing] == 0
    assert (np.delete(similarities[profile.same], 0) > 0.9).all()
    # The second call reads the cache.
    (root / "cfp.tar").touch()
    again = load_cfp_crops(root, tmp_path / "cache")
    assert np.array_equal(again.crops_NHWC, crops.crops_NHWC)


def test_a_missing_crop_is_named(tmp_path: Path) -> None:
    root = write_cfp(tmp_path / "cfp", without="p1-f0.webp")
    with pytest.raises(ConfigError, match=r"lacks 1 crops that the lists name, first p1-f0\.webp"):
        load_cfp_crops(root, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (root / "cfp.tar").unlink()
    with pytest.raises(ConfigError, match=r"cfp\.tar does not exist"):
        load_cfp_crops(root, tmp_path / "cache")
