"""The training loop trains every head, resumes bit for bit, and stops on errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.mxnet_files import write_bin
from tests.training.runs import BATCH, PEOPLE, PLAIN, SIDE, STEPS_PER_EPOCH, TINY, losses, table, tiny_run, write_people
from training.backbones import build_backbone
from training.config import ConfigError, HeadConfig, LoopConfig, RunConfig, TermConfig
from training.data.augment import draw_uniforms
from training.data.batches import Batch
from training.data.identities import load_identities
from training.data.sampling import BatchSampler
from training.errors import NonFiniteLossError
from training.losses import HEADS, TERMS
from training.losses.partial_fc import PartialFC
from training.optimization import loop as loop_module
from training.optimization.logs import truncate_log
from training.optimization.loop import Checkpoint, fit, learning_rate, margin_share, train_step
from training.optimization.objective import build_objective
from training.optimization.state import TrainingState, update_ema
from training.run.train import train_recognizer

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_people(tmp_path / "people")


class InterruptedRunError(Exception):
    pass


def cut_at(monkeypatch: pytest.MonkeyPatch, epoch: int, position: int) -> None:
    whole = BatchSampler.rows

    def rows(self: BatchSampler, at_epoch: int, at_position: int) -> NDArray[np.int64]:
        if (at_epoch, at_position) == (epoch, position):
            raise InterruptedRunError
        return whole(self, at_epoch, at_position)

    monkeypatch.setattr(BatchSampler, "rows", rows)


def same_networks(a: Checkpoint, b: Checkpoint) -> bool:
    pairs = [(m.state_dict(), n.state_dict()) for m, n in ((a.backbone, b.backbone), (a.head, b.head))]
    return all(torch.equal(value, other[name]) for one, other in pairs for name, value in one.items())


def rows(output: Path) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items()} for row in table(output / "losses.csv")]


@pytest.mark.parametrize("head", HEADS)
def test_a_step_moves_network_and_head(tmp_path: Path, head: str) -> None:
    config = tiny_run(tmp_path, tmp_path / "run", head, margin_warmup=0.5)
    terms = {"none": (TermConfig("triplet"),), "agents": (TermConfig("class_triplet"),)}
    config = replace(config, terms=terms.get(head, ()))
    state = TrainingState(build_backbone(TINY, SIDE), build_objective(config, PEOPLE), config.loop, CPU)
    before = [value.clone() for module in (state.backbone, state.objective) for value in module.parameters()]
    crops, labels = torch.randint(256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8), torch.arange(BATCH) // 2
    for number in (0, 1):
        batch = Batch(number, np.arange(BATCH), crops, labels, draw_uniforms(BATCH, 7, number))
        result = train_step(state.backbone, state, batch, config, 4)
    assert state.step == 2
    assert torch.isfinite(result.measured["loss"])
    named = [*state.backbone.named_parameters(), *state.objective.named_parameters()]
    for (name, now), old in zip(named, before, strict=True):
        assert not now.requires_grad or not torch.equal(now, old), name


@pytest.mark.parametrize("head", ["adacos", "none"])
def test_training_learns(folder: Path, tmp_path: Path, head: str) -> None:
    config = tiny_run(folder, tmp_path / "run", head, epochs=12, learning_rate=0.02, ema_decay=0.0)
    if head == "none":
        config = replace(config, terms=(TermConfig("triplet"),), data=replace(config.data, images_per_person=2))
    train_recognizer(config)
    curve = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(curve) == 12 * STEPS_PER_EPOCH
    assert np.mean(curve[-6:]) < 0.7 * np.mean(curve[:6])
    if head != "none":
        shares = [row["accuracy"] for row in rows(tmp_path / "run")]
        assert all(share * BATCH == int(share * BATCH) for share in shares)
        assert sum(shares[-6:]) > sum(shares[:6])


def test_all_terms_train_beside_a_head(folder: Path, tmp_path: Path) -> None:
    config = tiny_run(folder, tmp_path / "run", "cosface", epochs=1)
    terms = tuple(TermConfig(term, 0.5) for term in TERMS)
    train_recognizer(replace(config, terms=terms, data=replace(config.data, images_per_person=2)))
    logged = rows(tmp_path / "run")
    for row in logged:
        parts = [row[f"loss_{name}"] for name in ("head", *TERMS)]
        assert row["loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert all(any(row[f"loss_{term}"] != 0 for row in logged) for term in TERMS)
    objective = build_objective(replace(config, terms=terms), PEOPLE).eval()
    x, labels = torch.randn(BATCH, 16), torch.arange(BATCH) // 2
    parts, weights = objective(x, labels, np.arange(BATCH)), objective.head.class_weights()
    for name, term in objective.terms.items():
        assert parts[name].item() == pytest.approx(0.5 * term(x, labels, weights).item(), rel=1e-5), name


@pytest.mark.parametrize(
    "settings",
    [
        # A batch of four, so that a step does not use all six classes.
        {"loop.optimizer": "adamw", "loop.learning_rate": "0.001", "loop.schedule": "poly"}
        | {"loop.class_sampling": "0.5", "loop.batch_size": "4", "head.name": "cosface"},
        {"head.name": "elasticface", "terms.center": "0.01", "terms.ring": "0.01"},
        {"loop.gradient_checkpointing": "true", "loop.precision": "bf16", "data.images_per_person": "2"},
        {"loop.precision": "fp16", "head.name": "cosface"},
        {
            "loop.class_sampling": "0.5",
            "loop.sharded_checkpoint": "true",
            "loop.batch_size": "4",
            "head.name": "cosface",
        },
    ],
    ids=["adamw", "drawn_margins", "checkpointing", "fp16", "shards"],
)
def test_an_interrupted_run_resumes_with_equal_losses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    # Save at some steps only, so that others are repeated and logged twice.
    monkeypatch.setattr(loop_module, "_time_to_save", lambda step, due: step % 3 == 2)

    def config(name: str) -> RunConfig:
        return tiny_run(folder, tmp_path / name, epochs=2).overridden(settings)

    whole = train_recognizer(config("whole"))
    with monkeypatch.context() as patch:
        cut_at(patch, epoch=1, position=1)
        with pytest.raises(InterruptedRunError):
            train_recognizer(config("cut"))
    resumed = train_recognizer(config("cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_networks(whole, resumed)


def test_a_run_resumes_only_with_equal_settings_from_a_whole_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_recognizer(tiny_run(folder, tmp_path / "run", "cosface", epochs=1))
    with pytest.raises(ConfigError, match=r"head\.name"):
        train_recognizer(tiny_run(folder, tmp_path / "run", "arcface", epochs=1))
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()

    def torn(state: Any, stream: Any) -> None:
        stream.write(b"half a check")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(OSError, match="No space"):
            train_recognizer(tiny_run(folder, tmp_path / "run", "cosface", epochs=2))
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert train_recognizer(tiny_run(folder, tmp_path / "run", "cosface", epochs=2)).step == 2 * STEPS_PER_EPOCH


def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_and_names_the_cause(folder: Path, tmp_path: Path) -> None:
    config = tiny_run(folder, tmp_path / "run", "cosface")
    data = load_identities(config.data, tmp_path / "cache")
    objective = build_objective(config, data.num_classes)
    with torch.no_grad():
        objective.head.weight[0, 0] = float("nan")  # type: ignore[operator]
    with pytest.raises(NonFiniteLossError, match=r"step 0: head\.weight; first rows of the batch: \[\d+.*Lower loop"):
        fit(build_backbone(TINY, SIDE), objective, data, config)
    backbone = build_backbone(TINY, SIDE)
    with torch.no_grad():
        next(backbone.parameters()).fill_(float("inf"))
    with pytest.raises(NonFiniteLossError, match=r"step 0: stem\.0\.weight, embeddings of rows \[\d+"):
        fit(backbone, build_objective(config, data.num_classes), data, config)
    backbone = build_backbone(TINY, SIDE)
    next(backbone.parameters()).register_hook(lambda g: g * float("nan"))  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteLossError, match="gradient_backbone is not finite at step 1"):
        fit(backbone, build_objective(config, data.num_classes), data, config)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_compiled_backbone_trains_equally(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced without a C++ compiler: the test covers loop, state and EMA.
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network: compiled(network, backend="eager"))
    plain = train_recognizer(tiny_run(folder, tmp_path / "plain", epochs=1))
    traced = train_recognizer(tiny_run(folder, tmp_path / "traced", epochs=1, compile=True))
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    assert same_networks(plain, traced)


def test_the_ema_follows_every_step() -> None:
    model, averaged = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    expected = {name: value.clone() for name, value in averaged.state_dict().items()}
    for step in range(4):
        model(torch.randn(8, 2))
        with torch.no_grad():
            model.weight.add_(step)
        update_ema(averaged, model, 0.9)
        for name, value in model.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = 0.9 * expected[name] + 0.1 * value if floating else value.clone()
    for name, value in averaged.state_dict().items():
        assert torch.allclose(value, expected[name]), name


@pytest.mark.parametrize("sampling", [0.0, 1.0], ids=["whole", "split"])
def test_backbone_and_head_are_clipped_by_their_own_norms(folder: Path, tmp_path: Path, sampling: float) -> None:
    config = tiny_run(folder, tmp_path / "run", "cosface", gradient_clip=0.5, class_sampling=sampling)
    objective = build_objective(config, PEOPLE)
    state = TrainingState(build_backbone(TINY, SIDE), objective, config.loop, CPU)
    loss = objective.head(state.backbone(torch.randn(4, 3, SIDE, SIDE)), torch.tensor([0, 1, 2, 3]))
    state.begin_step(0.1)
    state.backward(loss)
    state.apply()
    for parameters in (list(state.backbone.parameters()), list(objective.parameters())):
        gradients = [p.grad for p in parameters if p.grad is not None]
        assert len(gradients) == len(parameters)
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.5, rel=1e-5)


def test_schedules() -> None:
    config = LoopConfig(learning_rate=0.1, warmup=10 / 110)
    for schedule, middle in (("cosine", 0.05), ("poly", 0.1 * 0.5**2)):
        chosen = replace(config, schedule=schedule)  # type: ignore[arg-type]
        assert learning_rate(0, 110, chosen) == pytest.approx(0.01)
        assert learning_rate(9, 110, chosen) == pytest.approx(0.1)
        assert learning_rate(60, 110, chosen) == pytest.approx(middle)
        assert learning_rate(110, 110, chosen) == pytest.approx(0.0)
    steps = replace(config, schedule="step", warmup=0.05)
    assert [learning_rate(s, 160, steps) for s in (9, 99, 100, 139, 140)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3])
    assert [margin_share(s, 10, LoopConfig(margin_warmup=0.4)) for s in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert margin_share(0, 10, LoopConfig()) == 1


@pytest.mark.usefixtures("pictures")
def test_a_run_writes_logs_plots_and_checkpoint(folder: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 112, 112, 3), dtype=np.uint8)
    write_bin(tmp_path / "odd.bin", [cv2.imencode(".png", p)[1].tobytes() for p in pixels], [True, False] * 10)
    config = replace(tiny_run(folder, tmp_path / "run"), validation=(tmp_path / "odd.bin",))
    train_recognizer(config)
    run = tmp_path / "run"
    assert json.loads((run / "config.json").read_text())["head"]["name"] == "adacos"
    assert (run / "losses.png").read_bytes().startswith(b"\x89PNG")
    logged = rows(run)
    assert set(logged[0]) == {
        *("step", "loss", "learning_rate", "scale", "target_angle_deg", "other_angle_deg", "accuracy"),
        *("embedding_norm", "embedding_spread", "gradient_backbone", "gradient_head", "clip_backbone", "clip_head"),
    }
    figures = table(run / "validation.csv")
    assert [int(row["step"]) for row in figures] == [STEPS_PER_EPOCH * e for e in (1, 2, 3, 4)]
    assert {row["measure"] for row in figures} == {"odd accuracy"}
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {"loss", "scale", "learning_rate", "odd accuracy"} <= set(events.Tags()["scalars"])
    counted = table(run / "angles.csv")
    assert [int(row["step"]) for row in counted] == [1, 6, 12]
    for row in counted:
        own, others = (sum(int(v) for k, v in row.items() if k.startswith(kind)) for kind in ("target", "other"))
        assert (own, others) == (BATCH, BATCH * (PEOPLE - 1))
    (at_ten,) = [e.value for e in events.Scalars("loss") if e.step == 10]
    assert at_ten == pytest.approx(logged[9]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head.name": "none"}, "needs a term"),
        ({"head.name": "agents"}, "Head agents needs a term .terms.class_triplet=1"),
        ({"head.name": "adacos", "loop.class_sampling": "1"}, "AdaCos needs all classes at once"),
        ({"head.name": "softmax", "loop.class_sampling": "1"}, "needs a cosine head"),
        ({"head.name": "cosface", "loop.class_sampling": "1", "terms.inter": "1"}, "class weights"),
        ({"head.marjin": "0.2"}, "marjin"),
    ],
)
def test_incompatible_settings_are_rejected(
    folder: Path, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_recognizer(tiny_run(folder, tmp_path / "run").overridden(settings))
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()  # before the photos are read


def test_ranks_have_equally_many_images_and_norms_of_their_own_on_cpus(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.distributed.world_size", lambda: 2)
    uneven = tiny_run(folder, tmp_path / "run", batch_size=BATCH + 1)
    shared = tiny_run(folder, tmp_path / "run", sync_batch_norm=True)
    for config, refused in ((uneven, "does not divide by 2 ranks"), (shared, "sync_batch_norm needs a GPU")):
        data = load_identities(config.data, tmp_path)
        objective = build_objective(uneven, data.num_classes)
        with pytest.raises(ConfigError, match=refused):
            fit(build_backbone(config.backbone, SIDE), objective, data, config)


def test_sharded_and_full_runs_share_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Also the optimizer's memory: what one began the other ends with the losses of an uninterrupted run. Their logs
    have other columns."""
    whole = tiny_run(folder, tmp_path / "whole", epochs=4, learning_rate=0.002, checkpoint_seconds=0.0)
    whole = replace(whole, head=HeadConfig("cosface", {"scale": 4.0}), augment=PLAIN)
    train_recognizer(whole)
    for first, second in ((0.0, 1.0), (1.0, 0.0)):
        config = replace(whole, output=tmp_path / f"{first}", loop=replace(whole.loop, class_sampling=first))
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, 2, 0)
            with pytest.raises(InterruptedRunError):
                train_recognizer(config)
        data = load_identities(config.data, tmp_path / "cache")
        config = replace(config, loop=replace(config.loop, class_sampling=second))
        fit(build_backbone(TINY, SIDE), build_objective(config, data.num_classes), data, config)
        one, other = ([float(v) for _, v in losses(o)] for o in (tmp_path / "whole", config.output))
        assert other == pytest.approx(one[2 * STEPS_PER_EPOCH :], rel=1e-4)


def partial_fc(folder: Path, classes: int, sampling: float) -> PartialFC:
    config = tiny_run(folder, folder / "run", "cosface", class_sampling=sampling)
    head = build_objective(config, classes).head.train()
    assert isinstance(head, PartialFC)
    return head


def step(head: PartialFC, optimizer: torch.optim.Optimizer, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    head.begin_step(labels)
    head(torch.randn(len(labels), 16), labels).backward()
    with head.optimizer_step(optimizer):
        optimizer.step()


LABELS = torch.tensor([3, 50, 99, 3])


def test_sampled_classes_are_those_of_the_batch_and_some_others(tmp_path: Path) -> None:
    head = partial_fc(tmp_path, 100, 0.5)
    before = head.table_PD.clone()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    step(head, optimizer, LABELS)
    moved = (head.table_PD != before).any(1)
    assert moved[LABELS].all()
    # At s = 64 the gradient of a far class may be below the precision of its weight.
    assert 3 < int(moved.sum()) <= 50
    momentum = head.own_tables()["momentum_buffer"].clone()
    step(head, optimizer, LABELS)
    gradients = head.own_tables()["momentum_buffer"] - 0.9 * momentum
    weight = optimizer.param_groups[0]["params"][0]
    for label in LABELS:
        assert (weight.grad - gradients[label]).abs().amax(1).min() < 1e-4, "the row's momentum goes on"


def test_steps_with_all_classes_copy_none(tmp_path: Path) -> None:
    head = partial_fc(tmp_path, 100, 1.0)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    tables: dict[str, set[int]] = {}
    for _ in range(3):
        before = head.table_PD.clone()
        step(head, optimizer, LABELS)
        assert not torch.equal(head.table_PD, before)
        in_optimizer = optimizer.param_groups[0]["params"][0]
        for name, held in [*head.own_tables().items(), ("weight", head.head.weight), ("weight", in_optimizer)]:
            tables.setdefault(name, set()).add(held.data_ptr())
    assert {name: len(places) for name, places in tables.items()} == {"weight": 1, "momentum_buffer": 1}


def test_a_sharded_head_moves_devices_and_checks_saved_classes(tmp_path: Path) -> None:
    head = partial_fc(tmp_path, 10, 1.0)
    with pytest.raises(ValueError, match="10 classes were saved, and the head has 8"):
        partial_fc(tmp_path, 8, 1.0).load_full_state(head.full_state())
    head.to("meta")
    assert head.table_PD.device.type == head.head.weight.device.type == "meta"


def test_figures_are_mirrored_to_wandb(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(folder, tmp_path / "run", wandb="faces")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs the package wandb"):
        train_recognizer(config)
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train_recognizer(config)
    train_recognizer(replace(config, loop=replace(config.loop, epochs=5)))
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert (first["project"], first["name"], first["resume"]) == ("faces", "run", "allow")
    assert second["id"] == first["id"]  # the curves go on
    logged = [(name, call.kwargs["step"]) for call in wandb.init().log.call_args_list for name in call.args[0]]
    assert ("loss", 10) in logged
    assert wandb.init().finish.call_count == 2


def test_fp16_skips_a_step_that_overflows(folder: Path, tmp_path: Path) -> None:
    config = tiny_run(folder, tmp_path / "run", "cosface", precision="fp16")
    objective = build_objective(config, PEOPLE)
    state = TrainingState(build_backbone(TINY, SIDE), objective, config.loop, CPU)
    before, scale = state.backbone.state_dict()["stem.0.weight"].clone(), state.scaler.get_scale()
    embeddings = state.backbone(torch.randn(4, 3, SIDE, SIDE))
    loss = objective.head(embeddings, torch.tensor([0, 1, 2, 3])) * 1e36
    state.begin_step(0.1)
    state.backward(loss)
    state.apply()
    assert torch.equal(before, state.backbone.state_dict()["stem.0.weight"])
    assert state.scaler.get_scale() == scale / 2


def test_a_log_is_truncated_and_loses_incomplete_lines(tmp_path: Path) -> None:
    log = tmp_path / "losses.csv"
    log.write_text("step,loss\n1,0.5\n\n2,0.25\n3,0.1\n4")
    truncate_log(log, 2, ("step", "loss"))
    assert log.read_text().split() == ["step,loss", "1,0.5", "2,0.25"]
    truncate_log(tmp_path / "new.csv", 0, ("step", "loss"))
    assert (tmp_path / "new.csv").read_text().split() == ["step,loss"]
