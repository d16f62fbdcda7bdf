"""A run is measured on people and photos that it is not trained on, and what it writes does not depend on stops."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.training.data.test_split import write_photos
from tests.training.optimization.test_loop import InterruptedRunError, cut_at
from tests.training.optimization.test_sharded import finish, start
from tests.training.runs import tiny_run
from training.cli.commands import app
from training.config import RunConfig
from training.evaluation import plots
from training.optimization import loop as loop_module
from training.run.train import train_recognizer


def held_out_run(root: Path, output: Path, epochs: int = 2) -> RunConfig:
    config = tiny_run(root, output, "cosface", epochs=epochs)
    loop = replace(config.loop, batch_size=32)
    return replace(config, loop=loop, data=replace(config.data, held_out_people=0.5, held_out_photos=0.3))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy crops in a color of each person's own."""
    root, rng = write_photos(tmp_path_factory.mktemp("photos") / "people"), np.random.default_rng(5)
    for person in sorted(root.iterdir()):
        color = rng.integers(40, 215, 3)
        for file in person.iterdir():
            cv2.imwrite(str(file), np.clip(color + rng.normal(0, 20, (112, 112, 3)), 0, 255).astype(np.uint8))
    return root


def rows(output: Path) -> list[Mapping[str, str]]:
    with (output / "validation.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_run_is_measured_on_what_it_is_not_trained_on(photos: Path, tmp_path: Path) -> None:
    config = held_out_run(photos, tmp_path / "run")
    checkpoint = train_recognizer(config)
    assert checkpoint.head.class_weights().shape[0] == 10  # type: ignore[union-attr]
    found = rows(tmp_path / "run")
    measures = {row["measure"] for row in found}
    assert {
        f"held-out {part} {name}" for part in ("people", "photos") for name in ("TAR at FAR 0.01", "rank-1")
    } <= measures
    steps = sorted({int(row["step"]) for row in found})
    assert steps == [checkpoint.step // 2, checkpoint.step]
    for row in found:
        ended = int(row["step"]) == checkpoint.step
        assert 0 <= float(row["value"]) <= 1
        if ended and row["measure"].startswith("held-out people"):
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
        if not ended:
            assert row["low"] == row["high"] == ""
    picture = cv2.imread(str(tmp_path / "run" / "worst_pairs.png"))
    assert picture is not None
    assert picture.shape[0] > 400


def test_a_run_of_few_photos_is_not_measured(tmp_path: Path) -> None:
    config = tiny_run(write_photos(tmp_path / "photos", 4, 2), tmp_path / "run", epochs=1)
    train_recognizer(replace(config, data=replace(config.data, held_out_people=0.05, held_out_photos=0.05)))
    assert not (tmp_path / "run" / "worst_pairs.png").exists()
    assert (tmp_path / "run" / "losses.png").exists()


def written(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.iterdir() if file.suffix in (".csv", ".png")}


@pytest.mark.parametrize("where", ["middle", "end"])
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the middle of an epoch, and after the last step, before the pictures."""
    monkeypatch.setattr(loop_module, "_time_to_save", lambda step, due: step % 2 == 0)
    whole = train_recognizer(held_out_run(photos, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        if where == "middle":
            cut_at(patch, epoch=1, position=0)
        else:
            patch.setattr("training.evaluation.plots.loss_curves", _stop)
        with pytest.raises(InterruptedRunError):
            train_recognizer(held_out_run(photos, tmp_path / "cut"))
    assert written(tmp_path / "cut") != written(tmp_path / "whole")
    resumed = train_recognizer(held_out_run(photos, tmp_path / "cut"))
    assert written(tmp_path / "cut") == written(tmp_path / "whole")
    assert {"angles.csv", "losses.csv", "losses.png", "validation.csv", "worst_pairs.png"} == written(
        tmp_path / "whole"
    ).keys()
    assert (resumed.step, resumed.loss) == (whole.step, whole.loss)
    kept = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "cut")]
    assert all(torch.equal(value, kept[1]["averaged"][name]) for name, value in kept[0]["averaged"].items())
    # Once more, after the end.
    train_recognizer(held_out_run(photos, tmp_path / "cut"))
    assert written(tmp_path / "cut") == written(tmp_path / "whole")


def _stop(path: Path) -> plots.Figure:
    raise InterruptedRunError


def test_the_first_rank_measures_for_all(photos: Path, tmp_path: Path) -> None:
    config = held_out_run(photos, tmp_path / "two", epochs=1)
    finish(start(2, config, method="spawn"))
    assert {row["step"] for row in rows(tmp_path / "two")} == {"1"}
    assert (tmp_path / "two" / "worst_pairs.png").exists()


def test_a_report_shows_the_people_and_photos_held_out(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_recognizer(held_out_run(photos, tmp_path / "run"))
    capsys.readouterr()
    report = tmp_path / "report.json"
    app(["evaluate", str(tmp_path / "run"), "--report", str(report)], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    found = {one["title"]: one["rates"] for one in json.loads(report.read_text())["people"]}
    last = [row for row in rows(tmp_path / "run") if row["low"]]
    assert len(last) > 3
    for row in last:
        title = "held-out people" if row["measure"].startswith("held-out people") else "held-out photos"
        value, low, high = found[title][row["measure"].removeprefix(f"{title} ")]
        assert [value, low, high] == pytest.approx([float(row[name]) for name in ("value", "low", "high")], rel=1e-4)
    assert "held-out people: TAR at FAR 0.01" in printed
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
