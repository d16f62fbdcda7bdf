"""The comparison of losses: one row per loss, mean and spread over seeds, LFW and CFP."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from models.pack.manifest import ModelPack
from models.vision.alignment import Alignment
from models.vision.detection import Detector
from tests.training.evaluation.test_benchmarks import write_lists
from tests.training.evaluation.test_cfp import write_cfp
from tests.training.runs import table, write_people
from training.cli.commands import app
from training.config import ConfigError, RunConfig
from training.evaluation.embedding import load_embedder
from training.evaluation.lfw import LfwCrops, evaluate_lfw
from training.optimization.loop import Checkpoint
from training.run import compare
from training.run.train import train_recognizer

TINY = {
    "backbone.widths": "[16,16,16]",
    "backbone.depths": "[1,1,1]",
    "backbone.embedding_dim": "16",
    "loop.batch_size": "12",
    "loop.precision": "fp32",
}


def write_data(root: Path, side: int = 112) -> Path:
    """Write a small CelebA with its manifest, and CFP."""
    people = write_people(root / "celeba", images=5, side=side)
    with (people / "manifest.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "identity"))
        rows.writerows((file.relative_to(people), file.parent.name) for file in sorted(people.rglob("*.png")))
    write_cfp(root / "cfp")
    return root


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The settings of the runs that are trained. LFW's photos are noise in a color of each person's own."""
    files, begun = write_lists(tmp_path / "lfw", np.random.default_rng(1)), list[RunConfig]()

    def crops(*_: object, alignment: Alignment) -> LfwCrops:
        side, rng = alignment.size_px, np.random.default_rng(2)
        person = np.unique([file.split("/")[0] for file in files], return_inverse=True)[1]
        colors = rng.integers(0, 200, (len(files), 1, 1, 3))[person]
        made = (colors + rng.integers(0, 56, (len(files), side, side, 3))).astype(np.uint8)
        return LfwCrops(tmp_path / "lfw", ("view1", "view2"), files, made, np.ones(len(files), bool))

    def train(config: RunConfig, detector: Detector) -> Checkpoint:
        begun.append(config)
        return train_recognizer(config, detector)

    monkeypatch.setattr(compare, "load_lfw_crops", crops)
    monkeypatch.setattr(compare, "train_recognizer", train)
    return begun


def test_scales_are_compared_at_a_crop_size_with_several_seeds(
    tmp_path: Path, pack: ModelPack, trained: list[RunConfig]
) -> None:
    data, output = write_data(tmp_path / "data", side=48), tmp_path / "out"

    def run(seeds: int, losses: Sequence[str] = ("cosface-30", "cosface-adaptive")) -> str:
        grid = {"data.crop_px": ["48"]}
        return compare.compare(losses, data, output, pack.detection, 2, 6, seeds, TINY, grid)

    run(1)
    rows = table(output / "comparison.csv")
    assert [row["loss"] for row in rows] == ["cosface-30-data.crop_px=48", "cosface-adaptive-data.crop_px=48"]
    for row in rows:
        last = table(output / row["loss"] / "losses.csv")[2:]
        embed, alignment = load_embedder(output / row["loss"])
        lfw = evaluate_lfw(embed, compare.load_lfw_crops(alignment=alignment), intervals=False)  # type: ignore[call-arg,attr-defined]
        view1, view2 = lfw.view1, lfw.view2
        assert view1 is not None and view2 is not None
        assert view2.tar_at_far_1e2 > view2.tar_at_far_1e3
        expected = {
            "Training loss": np.mean([float(s["loss"]) for s in last]),
            "Training accuracy %": 100 * np.mean([float(s["accuracy"]) for s in last]),
            "View 1 %": 100 * view1.accuracy,
            "View 2 %": 100 * view2.accuracy.mean,
            "TAR@FAR 1e-2 %": 100 * view2.tar_at_far_1e2,
            "TAR@FAR 1e-3 %": 100 * view2.tar_at_far_1e3,
            "Intra LFW": lfw.angles.intra,
            "Inter LFW": lfw.angles.inter,
        }
        for column, value in expected.items():
            assert float(row[column]) == pytest.approx(value, abs=0.06), column
        assert float(row["CFP-FP %"]) > 1
    assert [config.head.options.get("scale") for config in trained] == [30.0, None]
    # A finished run is not repeated: a second seed trains one more.
    printed = run(2, losses=["cosface-30"])
    assert [(config.output.name[-7:], config.loop.seed) for config in trained[2:]] == [("-seed-8", 8)]
    (row,) = table(output / "comparison.csv")
    assert all(" ± " in row[column] for column in compare.COLUMNS)
    assert row["CFP-FP %"] in printed


def test_a_grid_is_every_combination_of_its_settings_and_resumes(
    tmp_path: Path, pack: ModelPack, trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_data(tmp_path / "data"), tmp_path / "out"
    words = ["compare", "cosface", "--data", str(data), "--output", str(output), "--pack", str(pack.directory)]
    words += ["--epochs", "1", "--people", "6", "--threads", "1", "--set", "head.margin=0.1"]
    words += [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    words += ["--grid", "backbone.widths=[16,16,16],[16,16,24]", "--grid", "head.scale=16"]
    app(words, standalone_mode=False)
    assert "| cosface-backbone.widths=[16,16,24]-head.scale=16 |" in capsys.readouterr().out
    app([*words[:-1], "head.scale=16,8"], standalone_mode=False)  # two new points
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        app([*words, "--epochs", "2"], standalone_mode=False)
    widths = ((16, 16, 16), (16, 16, 24))
    assert [(run.backbone.widths, run.head.options) for run in trained] == [
        (width, {"scale": scale, "margin": 0.1}) for scale in (16, 8) for width in widths
    ]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"head.scales": ["1", "2"]}, "scales"),
        ({"head.scale": ["16", "wide"]}, "wide"),
        ({"head.scale": ["16", "-1"]}, "scale"),
    ],
)
def test_a_wrong_grid_is_refused_before_any_training(
    grid: dict[str, list[str]], message: str, tmp_path: Path, pack: ModelPack, trained: list[RunConfig]
) -> None:
    (tmp_path / "celeba").mkdir()
    with pytest.raises(ConfigError, match=message):
        compare.compare(["cosface"], tmp_path, tmp_path / "out", pack.detection, epochs=1, people=6, grid=grid)
    assert trained == []


def test_cells_are_means_and_standard_deviations() -> None:
    rows = [{"View 2 %": 80.0, "W-EC": 41.0}, {"View 2 %": 82.0, "W-EC": 43.0}, {"View 2 %": 84.0, "W-EC": 42.0}]
    cells = dict(zip(compare.COLUMNS, compare.summarize(rows), strict=True))
    assert (cells["View 2 %"], cells["W-EC"], cells["CFP-FP %"]) == ("82.00 ± 2.00", "42.0 ± 1.0", "-")
    assert dict(zip(compare.COLUMNS, compare.summarize(rows[:1]), strict=True))["View 2 %"] == "80.00"
