"""Settings proposed for a set suit its number of people and images, and the printed command trains with them."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.runs import write_people
from training.bounds import cosface_scale_bound, fixed_scale
from training.cli.commands import app
from training.config import ConfigError, DataConfig
from training.optimization.run_folder import read_run_config
from training.run import proposal
from training.run.proposal import Proposal, duration, propose

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement, which does not depend on people."""
    monkeypatch.setattr(proposal, "_images_per_second", lambda *_: 100.0)


def values(proposed: Proposal) -> dict[str, str]:
    return {choice.setting: choice.value for choice in proposed.choices}


def write_manifest(root: Path, people: int, images: int) -> Path:
    """Write a manifest of photos that do not exist."""
    root.mkdir()
    with (root / "manifest.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("file", "identity"))
        writer.writerows((f"{p}/{i}.jpg", f"p{p}") for p in range(people) for i in range(images))
    return root


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("people", "images"), [(10, 50), (300, 5093), (2000, 12_878), (20_000, 60_000)])
def test_scale_follows_the_number_of_people(tmp_path: Path, people: int, images: int) -> None:
    proposed = propose(DataConfig(tmp_path, None), people, images, CPU)
    scale = float(values(proposed)["head.scale"])
    assert scale == pytest.approx(max(10, fixed_scale(people), cosface_scale_bound(people, 0.9)), abs=0.05)
    assert proposed.scale_bounds["adacos_fixed_scale"] == pytest.approx(2**0.5 * np.log(people - 1))
    assert float(values(proposed)["head.margin"]) < proposed.scale_bounds["cosface_max_margin"]
    assert "--teacher" in proposed.command
    assert all(choice.why for choice in proposed.choices)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("images", "batch", "epochs"), [(50, 16, 40), (1000, 32, 40), (5093, 64, 37), (60_000, 128, 8)]
)
def test_steps_are_those_of_the_proposed_batches(tmp_path: Path, images: int, batch: int, epochs: int) -> None:
    proposed = propose(DataConfig(tmp_path, None), 10, images, CPU)
    assert (values(proposed)["loop.batch_size"], values(proposed)["loop.epochs"]) == (f"{batch}", f"{epochs}")
    assert proposed.steps == round(images * 0.95 * 0.95) // batch * epochs  # without those held out
    assert proposed.seconds == pytest.approx(proposed.steps * batch / 100)
    small = images < 20_000
    assert (values(proposed).get("loop.optimizer") == "adamw") == small == ("distill.weight" in values(proposed))
    assert float(values(proposed).get("loop.learning_rate", 0.1)) == pytest.approx(0.002 * batch / 64 if small else 0.1)


@pytest.mark.usefixtures("fast")
def test_half_a_million_images_and_a_gpu_get_the_larger_recipe(tmp_path: Path) -> None:
    data = DataConfig(tmp_path, None)
    large = propose(data, 20_000, 600_000, GPU)
    assert large.command.startswith("kith-train run medium ")
    assert "--teacher" not in large.command
    slow = propose(data, 20_000, 600_000, CPU)
    assert slow.command.startswith("kith-train run compact ")
    assert any("GPU" in note for note in slow.notes)
    assert propose(data, 300, 5093, GPU).recipe == "compact"


@pytest.mark.usefixtures("fast")
def test_few_people_are_told_that_a_pack_needs_no_training(tmp_path: Path) -> None:
    assert any("needs no training" in note for note in propose(DataConfig(tmp_path, None), 10, 50, CPU).notes)
    assert propose(DataConfig(tmp_path, None), 300, 5093, CPU).notes == ()
    with pytest.raises(ConfigError, match="two people"):
        propose(DataConfig(tmp_path, None), 1, 50, CPU)


@pytest.mark.usefixtures("fast")
def test_a_manifest_of_20_000_people_needs_no_photos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_manifest(tmp_path / "my set", 20_000, 3)
    app(["inspect", str(root), "--sample", "2", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["people"], found["images"], len(found["unreadable"])) == (20_000, 60_000, 2)
    assert found["proposal"]["recipe"] == "compact"
    assert f"--data '{root}' --output 'runs/my set'" in found["proposal"]["command"]


def test_the_printed_command_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people")
    app(["inspect", "people", "--folder"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "expected time" in printed
    line = next(line for line in printed.splitlines() if line.startswith("kith-train run"))
    small = "--epochs 1 --threads 1 --set backbone.widths=[16,16,16] --set backbone.depths=[1,1,1]"
    app([*shlex.split(line)[1:], *small.split()], standalone_mode=False)
    config = read_run_config(tmp_path / "runs" / "people")
    assert config.head.options == {"scale": 10, "margin": 0.35}
    assert (config.loop.batch_size, config.distill.teacher is not None) == (16, True)


def test_the_speed_includes_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "measure_speed", lambda *_: 1e9)
    with_teacher = propose(DataConfig(tmp_path, None), 300, 5093, CPU)
    without = propose(DataConfig(tmp_path, None), 20_000, 600_000, CPU)
    assert 0 < with_teacher.images_per_second < 1e6 < without.images_per_second == pytest.approx(1e9)


@pytest.mark.parametrize(("seconds", "text"), [(20, "20 s"), (600, "10 min"), (7200, "2.0 h"), (86400 * 3, "3.0 days")])
def test_durations_have_a_suitable_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
