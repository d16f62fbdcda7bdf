"""A search tries what it was told to, keeps the best, and continues with the same trials."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import pytest

from tests.training.mxnet_files import write_bin
from tests.training.runs import PEOPLE, tiny_run, write_people
from training.cli.commands import app
from training.config import ConfigError, RunConfig
from training.errors import NonFiniteLossError
from training.optimization.run_folder import CHECKPOINT, read_run_config
from training.run import search as searching
from training.run.search import SearchPlan, Trial, default_space, objective, parse_choice, parse_range, search

PAIRS = 20
SMALL = (
    "--threads 1 --folder --set loop.batch_size=8 --set loop.precision=fp32 --set loop.checkpoint_seconds=0 "
    "--set backbone.widths=[16,16,16] --set backbone.depths=[1,1,1] --set backbone.embedding_dim=16"
)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Return a run of six people that measures pairs of them after every epoch."""
    people = write_people(tmp_path / "people")
    photos = [people / f"p{p % PEOPLE}" / f"{p % 3}.png" for p in range(PAIRS)]
    others = [people / f"p{(p + p % 2) % PEOPLE}" / "3.png" for p in range(PAIRS)]
    images = [path.read_bytes() for pair in zip(photos, others, strict=True) for path in pair]
    write_bin(tmp_path / "pairs.bin", images, [p % 2 == 0 for p in range(PAIRS)])
    tiny = tiny_run(people, tmp_path / "search", "cosface", epochs=2)
    return replace(tiny, validation=(tmp_path / "pairs.bin",))


Figures = Callable[[RunConfig, int], float]


def simulate(monkeypatch: pytest.MonkeyPatch, figure: Figures) -> list[RunConfig]:
    """Replace training by a function of settings and epoch. Return the list of runs, which grows."""
    runs: list[RunConfig] = []

    def train(run: RunConfig, _detector: object, observe: Callable[[Mapping[str, float]], None]) -> None:
        runs.append(run)
        for epoch in range(1, run.loop.epochs + 1):
            observe({"pairs accuracy": figure(run, epoch)})

    monkeypatch.setattr(searching, "train_recognizer", train)
    return runs


def near_16(run: RunConfig, _epoch: int = 1) -> float:
    return 1 - abs(float(run.head.options["scale"]) - 16) / 100


def outcomes(trials: list[Trial]) -> list[tuple[int, str, float | None, dict[str, Any]]]:
    return [(t.number, t.state, t.objective, dict(t.settings)) for t in trials]


def test_a_search_writes_the_best_settings_for_a_run(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people, output = config.data.root, tmp_path / "found"
    words = f"search {people} --output {output} --sampler grid --trials 4 --range head.scale=8:32:log "
    words += f"--choice head.margin=0,0.3 --set loop.epochs=2 --set validation={config.validation[0]} {SMALL}"
    app(words.split(), standalone_mode=False)
    printed = capsys.readouterr().out
    assert f"kith-train run {output}/best.json" in printed
    with (output / "trials.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["head.scale"], row["head.margin"]) for row in rows} == {
        (scale, margin) for scale in ("8.0", "32.0") for margin in ("0", "0.3")
    }
    values = [float(row["objective"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert {row["epochs"] for row in rows} == {"2"}
    picture = cv2.imread(str(output / "trials.png"))
    assert picture is not None
    kept = [path.parent.name for path in (output / "trials").glob(f"*/{CHECKPOINT}")]
    assert kept == [f"{int(rows[0]['trial']):03d}"]

    run = tmp_path / "run"
    app(
        ["run", str(output / "best.json"), "--data", str(people), "--output", str(run), "--epochs", "1"],
        standalone_mode=False,
    )
    begun = read_run_config(run)
    assert begun.name == "compact"
    assert begun.head.options == {"scale": float(rows[0]["head.scale"]), "margin": float(rows[0]["head.margin"])}
    assert (begun.loop.batch_size, begun.output) == (8, run)


def test_a_killed_search_continues_with_the_same_trials(config: RunConfig, tmp_path: Path) -> None:
    ranges, plan = ["head.scale=8:64:log", "head.margin=0:0.5"], SearchPlan("random", 3)
    whole = search(config, ranges, [], plan)
    killed = replace(config, output=tmp_path / "killed")
    code = (
        "import sys, torch\nfrom pathlib import Path\nfrom training.optimization.run_folder import read_settings\n"
        "from training.run.search import SearchPlan, search\ntorch.set_num_threads(1)\n"
        "config = read_settings(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))\n"
        f"search(config, {ranges}, [], SearchPlan('random', 3))\n"
    )
    base = tmp_path / "base.json"
    base.write_text(json.dumps(config.as_dict()))
    process = subprocess.Popen(
        [sys.executable, "-c", code, base, config.data.root, killed.output], stderr=subprocess.DEVNULL
    )
    begun = killed.output / "trials" / "001" / "validation.csv"
    deadline = time.monotonic() + 300
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert begun.exists()
    assert outcomes(search(killed, ranges, [], plan)) == outcomes(whole)


def test_a_tree_of_parzen_estimators_approaches_the_optimum(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, near_16)
    ranges = ["head.scale=8:64:log"]

    def scales(sampling: searching.Sampling, seed: int = 7) -> list[float]:
        output = tmp_path / f"{sampling}-{seed}-{len(list(tmp_path.iterdir()))}"
        found = search(replace(config, output=output), ranges, [], SearchPlan(sampling, 24, seed=seed))
        return [float(t.settings["head.scale"]) for t in sorted(found, key=lambda t: t.number)]

    tpe, random = scales("tpe"), scales("random")
    assert tpe == scales("tpe") != scales("tpe", seed=8)
    assert tpe[: searching.RANDOM_TRIALS] == random[: searching.RANDOM_TRIALS]

    def mean_distance(values: list[float]) -> float:
        return sum(abs(value - 16) for value in values[-12:]) / 12

    assert mean_distance(tpe) < mean_distance(random) / 2


def test_poor_trials_are_pruned_and_failed_ones_listed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def figure(run: RunConfig, epoch: int) -> float:
        margin = float(run.head.options["margin"])
        if margin == 0.5:
            raise NonFiniteLossError("loss is not finite at step 3")
        return epoch / 100 - margin

    simulate(monkeypatch, figure)
    longer = replace(config, loop=replace(config.loop, epochs=8))
    found = search(longer, ["head.margin=0:0.5"], [], SearchPlan("grid", 11))
    states = {round(float(t.settings["head.margin"]), 2): t for t in found}
    assert [states[m / 100].state for m in range(0, 50, 5)] == ["complete"] * 4 + ["pruned"] * 6
    assert states[0.45].epochs < 8
    assert states[0.0] == found[0]
    assert (found[-1].state, found[-1].error) == ("failed", "loss is not finite at step 3")
    assert "not finite" in (config.output / "trials.csv").read_text()


def test_time_ends_a_call_and_another_continues(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = simulate(monkeypatch, near_16)
    clock = iter(range(0, 10_000, 35))
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    plan = SearchPlan("random", 4, minutes=1)
    first = search(config, ["head.scale=8:64:log"], [], plan)
    assert [(t.state, t.epochs) for t in first] == [("unfinished", 1)]  # every look at the clock takes 35 s
    second = search(config, ["head.scale=8:64:log"], [], replace(plan, minutes=None))
    assert [t.state for t in second] == ["complete"] * 4
    assert {run.output.name for run in runs} == {"000", "001", "002", "003"}
    more = search(config, ["head.scale=8:64:log"], [], SearchPlan("random", 5))
    assert outcomes([t for t in more if t.number < 4]) == outcomes(second)


def test_another_search_does_not_continue_in_the_folder(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, near_16)
    search(config, ["head.scale=8:64:log"], [], SearchPlan("random", 1))
    for changed, ranges, plan, name in (
        (config, ["head.scale=8:32:log"], SearchPlan("random", 1), "head.scale"),
        (config, ["head.scale=8:64:log"], SearchPlan("random", 1, seed=8), "seed"),
        (
            replace(config, loop=replace(config.loop, epochs=3)),
            ["head.scale=8:64:log"],
            SearchPlan("random", 1),
            "epochs",
        ),
    ):
        with pytest.raises(ConfigError, match=name):
            search(changed, ranges, [], plan)


@pytest.mark.parametrize(
    ("ranges", "choices", "trials", "message"),
    [
        (["head.scale"], [], 1, "KEY=LOW:HIGH"),
        (["head.scale=8:64:exp"], [], 1, "KEY=LOW:HIGH"),
        (["head.scale=8:nan"], [], 1, "KEY=LOW:HIGH"),
        (["head.scale=64:8"], [], 1, "LOW must be below HIGH"),
        (["head.scale=0:8:log"], [], 1, "above 0 with log"),
        ([], ["head.name=arcface"], 1, "two or more different values"),
        (["head.scale=8:64"], ["head.scale=8,16"], 1, "more than one"),
        (["head.scale=8:64"], ["head.name=cosface,adacos"], 4, "adacos has no option scale"),
        (["head.margin=0:3"], [], 4, "cosine margin"),
        (["loop.epoch=1:3"], [], 4, "unknown setting 'loop.epoch'"),
        (["head.scale=8:64", "head.margin=0:0.5"], [], 3, "4 points or more"),
    ],
)
def test_invalid_searches_are_rejected_before_any_training(
    config: RunConfig, ranges: list[str], choices: list[str], trials: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(config, ranges, choices, SearchPlan("grid", trials))
    assert not config.output.exists()


def test_a_search_needs_a_measure(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"validation=a\.bin"):
        search(replace(config, validation=()), ["head.scale=8:64"], [], SearchPlan())
    assert objective({"a accuracy": 0.5, "b accuracy": 0.7, "held-out distillation loss": 9}) == pytest.approx(0.6)
    assert objective({"held-out distillation loss": 0.2}) == -0.2


def test_ranges_are_whole_where_the_setting_is(config: RunConfig) -> None:
    def kind(text: str) -> str:
        return type(parse_range(text, config)[1]).__name__

    assert kind("loop.epochs=2:8") == "IntDistribution"
    assert {kind(f"{key}=1:8") for key in ("head.scale", "loop.weight_decay")} == {"FloatDistribution"}
    assert parse_choice("head.name=cosface,arcface")[1].choices == ("cosface", "arcface")


def test_scale_and_margin_are_searched_by_default(config: RunConfig) -> None:
    space = default_space(config, 2000)
    assert (space["head.scale"].low, space["head.scale"].high, space["head.scale"].log) == (7.6, 64.0, True)
    assert set(space) == {"head.scale", "head.margin"}
    assert set(default_space(config.overridden({"head.name": "adaptive_cosface"}), 10)) == {"head.margin"}
    with pytest.raises(ConfigError, match="--range or --choice"):
        default_space(config.overridden({"head.name": "adacos"}), 10)


def test_a_missing_optuna_is_named_with_its_extra(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "training.run.search")
    monkeypatch.delattr("training.run.search")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[training\]' in a clone"):
        app(["search", str(config.data.root), "--output", str(config.output)], standalone_mode=False)
