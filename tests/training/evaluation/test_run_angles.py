"""Angles of runs and of verification pairs."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from models.pack.manifest import ModelPack
from tests.training.evaluation.cfp_files import write_cfp
from tests.training.evaluation.test_benchmarks import write_lists
from tests.training.runs import tiny_run, write_people
from training.evaluation import figures, run_angles
from training.evaluation.lfw import LfwCrops
from training.evaluation.run_angles import BIN_DEG, PairAngles, read_run_angles
from training.run.train import train_recognizer


def test_the_angles_of_a_run_are_those_it_logged(tmp_path: Path) -> None:
    train_recognizer(tiny_run(write_people(tmp_path / "people"), tmp_path / "run", epochs=8))
    angles = read_run_angles(tmp_path / "run")
    with (tmp_path / "run" / "losses.csv").open(newline="") as stream:
        last = list(csv.DictReader(stream))[-1]
    assert (angles.target[-1], angles.other[-1]) == (float(last["target_angle_deg"]), float(last["other_angle_deg"]))
    assert list(angles.densities) == ["start", "middle", "end"]
    middles = (np.arange(36) + 0.5) * BIN_DEG
    for densities in angles.densities.values():
        np.testing.assert_allclose(densities.sum(1) * BIN_DEG, 1)
    own, others = angles.densities["end"] @ middles * BIN_DEG
    assert abs(own - angles.target[-1]) < BIN_DEG
    assert abs(others - angles.other[-1]) < BIN_DEG
    assert own < others


def test_the_overlap_is_the_error_at_the_best_angle() -> None:
    same = np.array([True, True, True, False, False])
    assert PairAngles(np.array([10.0, 20, 30, 60, 70]), same).overlap() == 0
    # At 30 degrees, one of three pairs of one person is missed.
    assert PairAngles(np.array([10.0, 20, 65, 60, 70]), same).overlap() == pytest.approx(1 / 6)
    assert PairAngles(np.array([90.0, 90, 90, 10, 10]), same).overlap() == 0.5


def test_pairs_of_a_run_and_a_pack_are_drawn(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, pack: ModelPack
) -> None:
    train_recognizer(tiny_run(write_people(tmp_path / "people"), tmp_path / "run", epochs=1))
    files = write_lists(tmp_path / "lfw", rng)
    crops = rng.integers(0, 255, (len(files), 112, 112, 3), dtype=np.uint8)
    seen = np.ones(len(files), bool)
    seen[0] = False
    found = LfwCrops(tmp_path / "lfw", ("view1", "view2"), files, crops, seen)
    monkeypatch.setattr(run_angles, "load_lfw_crops", lambda *_: found)
    write_cfp(tmp_path / "cfp")
    measured = figures.Measured([tmp_path / "run", pack.directory], tmp_path, pack.detection)
    (path,) = figures.draw("pair-angles", tmp_path / "figures", 100, measured)
    assert path.read_bytes().startswith(b"\x89PNG")
    angles = run_angles.measure_pair_angles(tmp_path / "run", tmp_path, pack.detection, tmp_path / "cache")
    assert list(angles) == ["LFW", "CFP-FF", "CFP-FP"]
    assert len(angles["CFP-FF"].same) == 16
    assert len(angles["CFP-FP"].same) == 15  # one profile was not found
