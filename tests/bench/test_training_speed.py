"""Both loops train by turns, and the parts of a step are all of its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.training_speed import PARTS, generated, markdown, measure
from training.data.batches import Batches
from training.recipes import compact

SMALL = {
    "loop.epochs": "3",
    "loop.batch_size": "4",
    "loop.precision": "fp32",
    "backbone.widths": "[16, 16, 16]",
    "backbone.embedding_dim": "16",
}


def test_loops_take_turns(tmp_path: Path) -> None:
    iterate, data = Batches.iterate, generated(tmp_path, 8)
    found = measure(compact(tmp_path, tmp_path / "run").overridden(SMALL), data)
    assert Batches.iterate is iterate, "what was watched is as it was"
    own, other = (found["images_per_s"][name] for name in ("Kith", "plain"))
    assert len(own) == len(other) == 1, "the first turn warms up, and the last is for the parts"
    assert found["ratio"]["median"] == pytest.approx(own[0] / other[0], rel=1e-3)
    for shares in found["shares"].values():
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) > 0, "every part was seen"
        assert max(shares, key=shares.get) == PARTS[1]
    page = markdown({**found, "ratio": {"median": 0.94, "min": 0.9, "max": 0.96}})
    assert "| Kith | " in page
    assert "0.94 (0.90 to 0.96), **below** the goal" in page
