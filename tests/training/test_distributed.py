"""Two ranks equal one process with the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.ranks import finish, start
from tests.training.runs import SIDE, losses, table, train_plain, write_people
from training import distributed
from training.data.identities import load_identities
from training.data.split import split_identities
from training.evaluation.embedding import torch_embedder
from training.losses import PartialFC, build_head
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


def test_ranks_validate_together(tmp_path: Path) -> None:
    """Figures are those of the saved network in one process. The ranks' own batch statistics differ."""
    settings = {**COMMON, "data.held_out_photos": "0.5", "loop.learning_rate": "0.05"}
    run = smoke(write_people(tmp_path / "people"), tmp_path / "two").overridden(settings)
    finish(start(2, train_recognizer, run))
    rows = table(tmp_path / "two" / "validation.csv")
    config = read_run_config(tmp_path / "two")
    split = split_identities(load_identities(config.data, tmp_path / "cache"), config.data, config.loop.seed)
    _, network = load_run(tmp_path / "two")
    expected = figures_of(HeldOut(split).measure(torch_embedder(network), intervals=True))
    last = {row["measure"]: float(row["value"]) for row in rows if row["step"] == rows[-1]["step"]}
    assert last.keys() == expected.keys()
    assert (tmp_path / "two" / "worst_pairs.png").exists()
    assert last
    for name, rate in expected.items():
        assert last[name] == pytest.approx(rate if isinstance(rate, float) else rate[0], abs=1e-6), name


def values(output: Path) -> list[tuple[float, float]]:
    return [(float(row["loss"]), float(row["scale"])) for row in table(output / "losses.csv")]


@pytest.mark.parametrize(
    "special",
    [
        {"head.name": "adacos"}
        | {"terms.center": "0.01", "terms.triplet": "1", "terms.range": "0.01", "terms.ring": "0.1"},
        {"head.name": "adaface", "head.scale": "4", "loop.class_sampling": "1.0"},
        {"head.name": "cosface", "head.scale": "4", "terms.ring": "0.1", "loop.accumulate": "2"},
        # Five classes over two ranks, with a regularizer of the head.
        {"head.name": "magface", "head.scale": "4", "head.l_a": "1", "head.u_a": "8", "head.lambda_g": "2"}
        | {"data.max_identities": "5", "loop.class_sampling": "1.0"},
    ],
    ids=["replicated", "partial_fc", "parts", "partial_fc_odd"],
)
def test_two_ranks_equal_one_process(tmp_path: Path, special: dict[str, str], request: pytest.FixtureRequest) -> None:
    folder = write_people(tmp_path / "people")
    one_run, two_run = (smoke(folder, tmp_path / name).overridden({**COMMON, **special}) for name in ("one", "two"))
    train_plain(one_run)
    finish(start(2, train_plain, two_run))
    one, two = (values(tmp_path / name) for name in ("one", "two"))
    assert len(one) == (12 if "partial_fc_odd" not in request.node.name else 8)
    # Sums in another order differ in the last digit.
    for step, (expected, actual) in enumerate(zip(one, two, strict=True)):
        assert actual == pytest.approx(expected, rel=1e-5 if step < 2 else 1e-2), step
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("one", "two")]
    for part in ("backbone", "averaged", "head"):
        for key, value in states[0][part].items():
            assert torch.allclose(value.float(), states[1][part][key].float(), atol=1e-2, rtol=1e-2), (part, key)
    # One process resumes a checkpoint of two ranks, including the optimizer.
    for run in (one_run, two_run):
        train_plain(run.overridden({"loop.epochs": "5"}))
    ends = [[float(v) for _, v in losses(tmp_path / n)[len(one) :]] for n in ("one", "two")]
    assert len(ends[0]) in (2, 3)
    assert ends[1] == pytest.approx(ends[0], rel=2e-2)


def test_parts_are_contiguous_and_complete() -> None:
    for count, world in ((10, 3), (4, 4), (7, 2), (3, 5)):
        parts = [distributed.split_evenly(count, rank, world) for rank in range(world)]
        assert [i for part in parts for i in range(count)[part]] == list(range(count))
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_a_sharded_head_needs_enough_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = build_head(smoke(tmp_path, tmp_path).overridden({"head.name": "cosface"}).head, 8, 3)
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    with pytest.raises(ValueError, match="3 classes cannot be split over 4 ranks"):
        PartialFC(head, 1.0)  # type: ignore[arg-type]
