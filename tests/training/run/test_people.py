"""A run is measured on people and photos that it is not trained on, and what it writes does not depend on stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import pytest
import torch

from tests.training.optimization.test_loop import InterruptedRunError, cut_at
from tests.training.runs import table, tiny_run, write_people
from training.cli.commands import app
from training.config import RunConfig
from training.evaluation import plots
from training.optimization import loop as loop_module
from training.optimization.loop import Checkpoint
from training.optimization.run_folder import load_checkpoint
from training.run.train import train_recognizer


def held_out_run(root: Path, output: Path) -> RunConfig:
    config = tiny_run(root, output, "cosface", epochs=2)
    return replace(config, data=replace(config.data, held_out_people=0.5, held_out_photos=0.3))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_people(tmp_path_factory.mktemp("photos") / "people", people=20)


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """An uninterrupted run."""
    torch.set_num_threads(1)
    return train_recognizer(held_out_run(photos, tmp_path_factory.mktemp("runs") / "whole"))


def test_a_run_is_measured_on_what_it_is_not_trained_on(whole: Checkpoint) -> None:
    assert whole.head.class_weights().shape[0] == 10  # type: ignore[union-attr]
    found = table(whole.path.with_name("validation.csv"))
    for part in ("people", "photos"):
        assert {f"held-out {part} {name}" for name in ("TAR at FAR 0.01", "rank-1")} <= {r["measure"] for r in found}
    assert sorted({int(row["step"]) for row in found}) == [whole.step // 2, whole.step]
    for row in found:
        ended = int(row["step"]) == whole.step
        assert 0 <= float(row["value"]) <= 1
        if ended and row["measure"].startswith("held-out people"):
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
        assert ended or row["low"] == row["high"] == ""
    picture = cv2.imread(str(whole.path.with_name("worst_pairs.png")))
    assert picture is not None
    assert picture.shape[0] > 400


@pytest.mark.usefixtures("pictures")
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(
    photos: Path, whole: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in an epoch, and after the last step, before the pictures."""
    monkeypatch.setattr(loop_module, "_time_to_save", lambda step, due: step % 2 == 1)
    cut = held_out_run(photos, tmp_path / "cut")

    def written(output: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in output.iterdir() if file.suffix in (".csv", ".png")}

    def stop(path: Path) -> plots.Figure:
        raise InterruptedRunError

    with monkeypatch.context() as patch:
        cut_at(patch, epoch=1, position=1)
        with pytest.raises(InterruptedRunError):
            train_recognizer(cut)
    with monkeypatch.context() as patch:
        patch.setattr(plots, "loss_curves", stop)
        with pytest.raises(InterruptedRunError):
            train_recognizer(cut)
    resumed = train_recognizer(cut)
    assert (resumed.step, resumed.loss) == (whole.step, whole.loss)
    assert written(cut.output) == written(whole.path.parent)
    names = {"angles.csv", "losses.csv", "losses.png", "validation.csv", "worst_pairs.png"}
    assert written(cut.output).keys() == names
    kept = [load_checkpoint(one.path)["averaged"] for one in (whole, resumed)]
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


@pytest.mark.usefixtures("pictures")
def test_a_report_shows_the_people_and_photos_held_out(
    whole: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    app(["evaluate", str(whole.path.parent), "--report", str(report)], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    found = {one["title"]: one["rates"] for one in json.loads(report.read_text())["people"]}
    last = [row for row in table(whole.path.with_name("validation.csv")) if row["low"]]
    assert len(last) > 3
    for row in last:
        title = "held-out people" if row["measure"].startswith("held-out people") else "held-out photos"
        value, low, high = found[title][row["measure"].removeprefix(f"{title} ")]
        assert [value, low, high] == pytest.approx([float(row[name]) for name in ("value", "low", "high")], rel=1e-4)
    assert "held-out people: TAR at FAR 0.01" in printed
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
