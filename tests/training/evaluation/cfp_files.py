"""CFP's layout with people of one color each."""

from __future__ import annotations

import colorsys
import csv
import io
import tarfile
from pathlib import Path

import cv2
import numpy as np

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
