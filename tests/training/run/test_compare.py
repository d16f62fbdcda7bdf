"""The comparison of losses: one row per loss, mean and spread over seeds, LFW and CFP."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from models.pack.manifest import ModelPack
from models.vision.alignment import Alignment
from models.vision.detection import Detector
from tests.training.evaluation.cfp_files import write_cfp
from tests.training.evaluation.test_benchmarks import write_lists
from tests.training.runs import write_people
from training.cli.commands import app
from training.config import ConfigError, RunConfig
from training.evaluation.lfw import LfwCrops
from training.optimization.loop import Checkpoint
from training.optimization.run_folder import read_json
from training.run import compare
from training.run.train import train_recognizer

BATCH = 128


def write_data(root: Path, side: int = 112) -> Path:
    """Write a small CelebA with its manifest, and CFP."""
    people = write_people(root / "celeba", images=BATCH // 6 + 1, side=side)
    with (people / "manifest.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "identity"))
        rows.writerows((file.relative_to(people), file.parent.name) for file in sorted(people.rglob("*.png")))
    write_cfp(root / "cfp")
    return root


@pytest.fixture
def lfw(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_lists(tmp_path / "lfw", rng)

    def crops(*_: object, alignment: Alignment) -> LfwCrops:
        side = alignment.size_px
        made = rng.integers(0, 255, (len(files), side, side, 3), dtype=np.uint8)
        return LfwCrops(tmp_path / "lfw", ("view1", "view2"), files, made, np.ones(len(files), bool))

    monkeypatch.setattr(compare, "load_lfw_crops", crops)


@pytest.mark.usefixtures("lfw")
def test_a_loss_is_trained_with_several_seeds(tmp_path: Path, pack: ModelPack) -> None:
    data, output = write_data(tmp_path / "data"), tmp_path / "out"
    table = compare.compare(["adacos"], data, output, pack.detection, epochs=1, people=6, seeds=2)
    assert {path.parent.name for path in output.glob("*/row.json")} == {"adacos", "adacos-seed-8"}
    with (output / "comparison.csv").open(newline="", encoding="utf-8") as stream:
        (row,) = csv.DictReader(stream)
    assert row["loss"] == "adacos"
    assert all(" ± " in row[column] for column in compare.COLUMNS)
    assert row["CFP-FP %"] in table

    # Finished runs are not repeated: one seed gives the first run's values.
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoint.pt")}
    one = compare.compare(["adacos"], data, output, pack.detection, epochs=1, people=6)
    assert "±" not in one
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoint.pt")}


@pytest.mark.usefixtures("lfw")
def test_fixed_and_adaptive_scales_are_compared_at_a_crop_size(tmp_path: Path, pack: ModelPack) -> None:
    data, output = write_data(tmp_path / "data", side=144), tmp_path / "out"
    losses = ["cosface-30", "cosface-adaptive"]
    shared = {"loop.learning_rate": "0.05"}
    compare.compare(losses, data, output, pack.detection, epochs=2, people=6, sizes=[144], settings=shared)
    with (output / "comparison.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["loss"] for row in rows] == ["cosface-30-144px", "cosface-adaptive-144px"]
    for row in rows:
        with (output / row["loss"] / "losses.csv").open(newline="", encoding="utf-8") as stream:
            steps = list(csv.DictReader(stream))
        last = steps[len(steps) // 2 :]
        assert float(row["Training loss"]) == pytest.approx(np.mean([float(s["loss"]) for s in last]), abs=0.006)
        assert float(row["Training accuracy %"]) == pytest.approx(
            100 * np.mean([float(s["accuracy"]) for s in last]), abs=0.06
        )
        assert float(row["CFP-FP %"]) > 0
    configs = [read_json(output / row["loss"] / "config.json") for row in rows]
    assert [config["head"]["options"].get("scale") for config in configs] == [30.0, None]
    assert [config["loop"]["learning_rate"] for config in configs] == [0.05, 0.05]
    # Crops of 112 are another comparison, and these files are not such crops.
    with pytest.raises(ConfigError, match=r"is 144x144, not a 112x112 crop"):
        compare.compare(losses, data, output, pack.detection, epochs=2, people=6)


@pytest.mark.usefixtures("lfw")
def test_a_grid_is_every_combination_of_its_settings_and_resumes(
    tmp_path: Path, pack: ModelPack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[RunConfig] = []

    def train(config: RunConfig, detector: Detector | None) -> Checkpoint:
        trained.append(config)
        return train_recognizer(config, detector)

    monkeypatch.setattr(compare, "train_recognizer", train)
    data, output = write_data(tmp_path / "data"), tmp_path / "out"
    words = ["compare", "cosface", "--data", str(data), "--output", str(output), "--pack", str(pack.directory)]
    words += ["--epochs", "1", "--people", "6", "--threads", "1", "--set", "head.margin=0.1"]
    words += ["--grid", "backbone.widths=[16,16,16],[16,16,24]", "--grid", "head.scale=16,32"]
    app(words, standalone_mode=False)
    found = [(run.backbone.widths, run.head.options) for run in trained]
    assert found == [
        (widths, {"scale": scale, "margin": 0.1}) for widths in ((16, 16, 16), (16, 16, 24)) for scale in (16, 32)
    ]
    assert "| cosface-backbone.widths=[16,16,24]-head.scale=32 |" in capsys.readouterr().out
    app([*words[:-1], "head.scale=32,8"], standalone_mode=False)  # two new points
    assert [run.head.options["scale"] for run in trained[4:]] == [8, 8]


@pytest.mark.usefixtures("lfw")
@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"head.scales": ["1", "2"]}, "scales"),
        ({"head.scale": ["16", "wide"]}, "wide"),
        ({"head.scale": ["16", "-1"]}, "scale"),
        ({"loop.epoch": ["1"]}, "unknown setting 'loop.epoch'"),
    ],
)
def test_a_wrong_grid_is_refused_before_any_training(
    grid: dict[str, list[str]], message: str, tmp_path: Path, pack: ModelPack
) -> None:
    data, output = write_data(tmp_path / "data"), tmp_path / "out"
    with pytest.raises(ConfigError, match=message):
        compare.compare(["cosface"], data, output, pack.detection, epochs=1, people=6, grid=grid)
    assert not list(output.glob("*/config.json"))


def test_cells_are_means_and_standard_deviations() -> None:
    rows = [{"View 2 %": 80.0, "W-EC": 41.0}, {"View 2 %": 82.0, "W-EC": 43.0}, {"View 2 %": 84.0, "W-EC": 42.0}]
    cells = dict(zip(compare.COLUMNS, compare.summarize(rows), strict=True))
    assert (cells["View 2 %"], cells["W-EC"], cells["CFP-FP %"]) == ("82.00 ± 2.00", "42.0 ± 1.0", "-")
    assert dict(zip(compare.COLUMNS, compare.summarize(rows[:1]), strict=True))["View 2 %"] == "80.00"
