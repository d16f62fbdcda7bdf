"""CFP's lists and crops: photos without a face count as not recognized, gaps are reported."""

from __future__ import annotations

import colorsys
import csv
import io
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from training.config import ConfigError
from training.evaluation.cfp import embed_cfp, load_cfp_crops
from training.evaluation.lfw import verify_similarities

PEOPLE, FOLDS = 8, 2


def write_cfp(root: Path, without: str = "") -> Path:
    """Write two frontal photos and a profile per person, and the two lists. The first profile was not found."""
    rng = np.random.default_rng(4)
    root.mkdir(parents=True)
    with tarfile.open(root / "cfp.tar", "w") as tar:
        for person in range(PEOPLE):
            color = np.array(colorsys.hsv_to_rgb(person / PEOPLE, 1, 1)) * 255
            for view in ("f0", "f1", "s0"):
                pixels = np.clip(color + rng.normal(0, 10, (112, 112, 3)), 0, 255).astype(np.uint8)
                encoded = cv2.imencode(".webp", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()
                member = tarfile.TarInfo(f"p{person}-{view}.webp")
                member.size = len(encoded)
                if member.name != without:
                    tar.addfile(member, io.BytesIO(encoded))
    for name, view in (("pairs_FF.csv", "f1"), ("pairs_FP.csv", "s0")):
        with (root / name).open("w", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream)
            rows.writerow(("fold", "same", "file_a", "file_b"))
            for person in range(PEOPLE):
                fold, other = 1 + person % FOLDS, (person + 3) % PEOPLE
                found = "" if (person, view) == (0, "s0") else f"p{person}-{view}.webp"
                rows.writerow((fold, 1, f"p{person}-f0.webp", found))
                rows.writerow((fold, 0, f"p{person}-f0.webp", f"p{other}-{view}.webp"))
    return root


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
