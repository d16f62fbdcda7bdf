"""A run reports wrong angles, stuck losses, dead embeddings and hidden clipping, and stops on request."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import PEOPLE, PLAIN, SIDE, TINY, losses, tiny_run, write_people
from training.backbones import build_backbone
from training.config import HeadConfig
from training.data.identities import load_identities
from training.errors import RunInterruptedError
from training.optimization import loop as loop_module
from training.optimization.health import RunHealth
from training.optimization.logs import RunLog
from training.optimization.loop import fit
from training.optimization.monitor import Monitor, StepResult
from training.optimization.objective import build_objective
from training.optimization.run_folder import load_checkpoint
from training.optimization.state import TrainingState
from training.run.train import train_recognizer

HEALTHY = {
    "loss": 5.0,
    "learning_rate": 0.1,
    "target_angle_deg": 60.0,
    "embedding_norm": 10.0,
    "embedding_spread": 0.9,
    "clip_backbone": 1.0,
    "clip_head": 1.0,
}


def warnings_of(head: HeadConfig, steps: int = 500, first: int = 1, **values: Any) -> list[str]:
    """Warnings of a run whose values are HEALTHY, but for these, while its target angle falls."""
    health, found = RunHealth(steps, head, 300), list[str]()
    for step in range(first, steps + 1):
        falling = {"loss": 600 - step, "target_angle_deg": 88 - 60 * step / steps}
        found += health.check(step, {**HEALTHY, **falling, **values})
    return found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_angle_deg": 153.0}, r"step 10: the mean target angle is 153 degrees.*head\.scale=8\.1.*continuous"),
        ({"embedding_norm": 1e-5}, "step 10: embeddings have length 1.0e-05: dead"),
        ({"embedding_spread": 0.002}, "step 10: all embeddings point in one direction"),
        ({"clip_backbone": 0.05}, r"gradient of the backbone by 0\.05, to a rate of 0\.005"),
        ({"target_angle_deg": 85.0}, r"step 20: the mean target angle is 85\.0 degrees, at step 10 it was 85\.0"),
    ],
)
def test_each_problem_is_reported_once_within_5_percent_of_the_run(values: dict[str, Any], message: str) -> None:
    text = warnings_of(HeadConfig("arcface", {"scale": 64.0}), **values)[0]
    assert re.search(message, text)
    assert int(re.findall(r"step (\d+):", text)[0]) <= 25


def test_short_runs_and_runs_without_a_target_angle_are_judged_too() -> None:
    (text,) = warnings_of(HeadConfig("cosface"), steps=30, target_angle_deg=85.0)
    assert "nothing is learned" in text
    health = RunHealth(500, HeadConfig("none"), 300)
    plain = {name: value for name, value in HEALTHY.items() if name != "target_angle_deg"}
    (text,) = [text for step in range(1, 501) for text in health.check(step, plain)]
    assert "the loss is 5, at step 10 it was 5" in text


def test_a_healthy_run_has_no_warnings() -> None:
    assert warnings_of(HeadConfig("adacos")) == []
    assert warnings_of(HeadConfig("adacos"), steps=50) == []
    # A growing margin raises the loss of a run that learns.
    assert warnings_of(HeadConfig("cosface"), loss=33.0) == []
    # A run that is resumed late is not judged by its first steps.
    assert warnings_of(HeadConfig("cosface"), first=300, target_angle_deg=40.0) == []
    assert "continuous" not in warnings_of(HeadConfig("cosface"), target_angle_deg=100.0)[0]


def test_a_run_logs_its_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(RunHealth(3, HeadConfig("none"), 2), torch.device("cpu"))
    measured = {name: torch.tensor(value) for name, value in {**HEALTHY, "embedding_norm": 0.0}.items()}
    for step in (1, 2, 3):
        monitor.add(StepResult(step, measured, {}))
    with closing(RunLog(tmp_path, 0, 3, 8, silent=True, epoch_steps=3)) as logs:
        monitor.flush(logs)
    assert caplog.text.count("dead") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_a_checkpoint_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    step = loop_module.train_step

    def signaled(network: Any, state: TrainingState, *arguments: Any) -> Any:
        if state.step == 4:
            assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
            signal.raise_signal(number)
        return step(network, state, *arguments)

    monkeypatch.setattr(loop_module, "train_step", signaled)
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run")
    with pytest.raises(RunInterruptedError, match=r"stopped at step 5 of 12\. .* kith-train resume .*/run"):
        train_recognizer(config)
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["step"] == len(losses(tmp_path / "run")) == 5


def test_parts_of_a_batch_give_the_gradient_of_the_batch(tmp_path: Path) -> None:
    """With batch norms at rest, and no clipping, which would hide a factor; classes are sampled once for all parts."""
    folder = write_people(tmp_path / "people")
    for head, sampling in (("cosface", 0.0), ("cosface", 1.0), ("magface", 0.0)):
        results = []
        for parts in (1, 4):
            config = tiny_run(
                folder, tmp_path / f"{head}{sampling}{parts}", head, epochs=1, accumulate=parts, gradient_clip=0.0
            )
            config = replace(config, loop=replace(config.loop, class_sampling=sampling), augment=PLAIN)
            data = load_identities(config.data, tmp_path / "cache")
            torch.manual_seed(0)
            backbone, objective = build_backbone(TINY, SIDE), build_objective(config, PEOPLE)
            backbone.train = lambda mode=True: backbone  # type: ignore[method-assign]  # noqa: B023
            backbone.apply(lambda module: setattr(module, "training", False))
            results.append(fit(backbone, objective, data, config))
        for (name, one), other in zip(
            results[0].backbone.named_parameters(), results[1].backbone.parameters(), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-3), (head, sampling, name)
