"""Students learn the embeddings of every kind of teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models.pack.manifest import ModelPack
from models.vision.recognition import Recognizer
from tests.training.runs import SIDE, TINY, as_set, losses, tiny_run, with_mirror
from training.backbones import build_backbone
from training.config import ConfigError, DistillConfig
from training.data.identities import load_identities
from training.evaluation.embedding import teacher_embeddings, torch_embedder
from training.optimization.distillation import Distillation
from training.optimization.run_folder import load_checkpoint, load_run
from training.run.train import train_recognizer


def test_a_pack_teaches_its_served_embeddings(
    pack: ModelPack, recognizer: Recognizer, rng: np.random.Generator
) -> None:
    crops = rng.integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)
    expected = with_mirror(recognizer.embed, crops)
    for teacher in (pack.directory, pack.recognition.path):
        np.testing.assert_allclose(teacher_embeddings(teacher, as_set(crops)).numpy(), expected, atol=1e-5)


def test_a_run_and_an_exported_program_teach(finished: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 255, (2, SIDE, SIDE, 3), dtype=np.uint8)
    taught = teacher_embeddings(finished / "run", as_set(crops))
    assert not taught.requires_grad
    expected = with_mirror(torch_embedder(load_run(finished / "run")[1]), crops)
    np.testing.assert_allclose(taught.numpy(), expected, atol=1e-6)
    backbone, images = build_backbone(TINY).eval(), torch.rand(3, 3, 112, 112) * 2 - 1
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(backbone, (images,), dynamic_shapes=({0: batch},)), tmp_path / "teacher.pt2")
    crops = rng.integers(0, 255, (2, 112, 112, 3), dtype=np.uint8)
    taught = teacher_embeddings(tmp_path / "teacher.pt2", as_set(crops))
    np.testing.assert_allclose(taught.numpy(), with_mirror(torch_embedder(backbone), crops), atol=1e-5)


def test_a_student_comes_closer_to_its_teacher(finished: Path, tmp_path: Path) -> None:
    """Head none leaves the teacher as the only signal."""
    student = replace(
        tiny_run(finished / "people", tmp_path / "student", "none", epochs=12, learning_rate=0.02, ema_decay=0.0),
        distill=DistillConfig(finished / "run", 2.0),
    )
    checkpoint = train_recognizer(student)
    curve = np.array([float(v) for _, v in losses(tmp_path / "student")])
    assert curve[-6:].mean() < 0.7 * curve[:3].mean()
    crops = load_identities(student.data, tmp_path / "cache").crops_NHWC.copy()
    taught, untaught = (torch_embedder(network) for network in (checkpoint.backbone, build_backbone(TINY, SIDE).eval()))
    teacher = teacher_embeddings(finished / "run", as_set(crops)).numpy()
    assert (taught(crops) * teacher).sum(1).mean() > (untaught(crops) * teacher).sum(1).mean() + 0.2


def test_other_dimensions_are_projected_and_saved(finished: Path, tmp_path: Path, pack: ModelPack) -> None:
    config = tiny_run(finished / "people", tmp_path / "run", "cosface", epochs=1)
    config = replace(config, distill=DistillConfig(pack.directory))
    state = load_checkpoint(train_recognizer(config).path)
    assert state["distillation"]["projection.weight"].shape == (pack.recognition.dimension, 16)
    assert train_recognizer(replace(config, loop=replace(config.loop, epochs=2))).step == 6


def test_the_loss_is_one_minus_the_cosine() -> None:
    wanted = F.normalize(torch.randn(3, 16))
    distillation = Distillation(wanted, 16, weight=2.0)
    x, rows = torch.randn(3, 16), np.array([2, 0, 1])
    pairs = zip(x, wanted[rows], strict=True)
    expected = 2 * np.mean([1 - float(a @ b) / float(a.norm() * b.norm()) for a, b in pairs])
    assert distillation(x, rows).item() == pytest.approx(expected, abs=1e-6)
    assert distillation(wanted[rows] * 7, rows).item() == pytest.approx(0, abs=1e-6)


def test_an_invalid_teacher_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    for path in (tmp_path / "empty", tmp_path / "broken.onnx"):
        with pytest.raises(ConfigError, match=r"distill\.teacher"):
            teacher_embeddings(path, as_set(np.zeros((1, 112, 112, 3), np.uint8)))
