"""Two ranks equal one process with the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.runs import SIDE, finish, losses, start, table, train_plain, write_people
from training import distributed
from training.config import RunConfig
from training.data.identities import load_identities
from training.data.split import split_identities
from training.evaluation.embedding import torch_embedder
from training.losses import build_head
from training.losses.partial_fc import PartialFC
from training.optimization.run_folder import load_run, read_run_config
from training.recipes import smoke
from training.run.people import HeldOut, figures_of
from training.run.train import train_recognizer

pytestmark = pytest.mark.long

COMMON = {
    "data.crop_px": str(SIDE),
    "data.max_identities": "6",
    "data.manifest": "null",
    "data.held_out_photos": "0",
    "backbone.widths": "[16,16,16]",
    "backbone.stem": "16",
    "backbone.depths": "[1,1,1]",
    "backbone.embedding_dim": "16",
    "loop.batch_size": "8",
    "loop.epochs": "4",
    "loop.learning_rate": "0.0005",
    "loop.precision": "fp32",
    "loop.checkpoint_seconds": "0",
    # Clipping would hide a common factor of all gradients.
    "loop.gradient_clip": "0",
}


SPECIAL = {
    "replicated": {"head.name": "adacos"}
    | {"terms.center": "0.01", "terms.triplet": "1", "terms.range": "0.01", "terms.ring": "0.1"},
    "partial_fc": {"head.name": "adaface", "head.scale": "4", "loop.class_sampling": "1.0"},
    "parts": {"head.name": "cosface", "head.scale": "4", "terms.ring": "0.1", "loop.accumulate": "2"},
    # Five classes over two ranks, with a regularizer of the head.
    "partial_fc_odd": {"head.name": "magface", "head.scale": "4", "head.l_a": "1", "head.u_a": "8"}
    | {"head.lambda_g": "2", "data.max_identities": "5", "loop.class_sampling": "1.0"},
}


def run_of(root: Path, output: str, special: dict[str, str]) -> RunConfig:
    return smoke(root / "people", root / output).overridden({**COMMON, **special})


def train_all(root: Path) -> None:
    """Train every run on this rank."""
    train_recognizer(run_of(root, "validated", {"data.held_out_photos": "0.5", "loop.learning_rate": "0.05"}))
    for name, special in SPECIAL.items():
        train_plain(run_of(root, f"{name}-two", special))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    write_people(folder / "people")
    finish(start(2, train_all, folder))
    return folder


def test_ranks_validate_together(root: Path) -> None:
    """Figures are those of the saved network in one process. The ranks' own batch statistics differ."""
    run = root / "validated"
    rows, config = table(run / "validation.csv"), read_run_config(run)
    split = split_identities(load_identities(config.data, root / "cache"), config.data, config.loop.seed)
    _, network = load_run(run)
    expected = figures_of(HeldOut(split).measure(torch_embedder(network), intervals=True))
    last = {row["measure"]: float(row["value"]) for row in rows if row["step"] == rows[-1]["step"]}
    assert last.keys() == expected.keys()
    assert (run / "worst_pairs.png").exists()
    assert last
    for name, rate in expected.items():
        assert last[name] == pytest.approx(rate if isinstance(rate, float) else rate[0], abs=1e-6), name


def values(output: Path) -> list[tuple[float, float]]:
    return [(float(row["loss"]), float(row["scale"])) for row in table(output / "losses.csv")]


@pytest.mark.parametrize("name", SPECIAL)
def test_two_ranks_equal_one_process(name: str, root: Path) -> None:
    outputs = f"{name}-one", f"{name}-two"
    train_plain(run_of(root, outputs[0], SPECIAL[name]))
    one, two = (values(root / output) for output in outputs)
    assert len(one) == (8 if name == "partial_fc_odd" else 12)
    # Sums in another order differ in the last digit.
    for step, (expected, actual) in enumerate(zip(one, two, strict=True)):
        assert actual == pytest.approx(expected, rel=1e-5 if step < 2 else 1e-2), step
    states = [torch.load(root / output / "checkpoint.pt", weights_only=True) for output in outputs]
    for part in ("backbone", "averaged", "head"):
        for key, value in states[0][part].items():
            assert torch.allclose(value.float(), states[1][part][key].float(), atol=1e-2, rtol=1e-2), (part, key)
    # One process resumes a checkpoint of two ranks, including the optimizer.
    for output in outputs:
        train_plain(run_of(root, output, {**SPECIAL[name], "loop.epochs": "5"}))
    ends = [[float(v) for _, v in losses(root / output)[len(one) :]] for output in outputs]
    assert len(ends[0]) in (2, 3)
    assert ends[1] == pytest.approx(ends[0], rel=2e-2)


def test_a_sharded_head_needs_enough_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = build_head(smoke(tmp_path, tmp_path).overridden({"head.name": "cosface"}).head, 8, 3)
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    with pytest.raises(ValueError, match="3 classes cannot be split over 4 ranks"):
        PartialFC(head, 1.0)  # type: ignore[arg-type]
