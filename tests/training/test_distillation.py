"""A student learns what its teacher says, whatever the teacher is made of."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.alignment import STANDARD, Alignment, recut
from models.pack import ModelPack
from models.recognition import Recogniser
from tests.training.runs import TINY, losses, tiny_run, write_people
from training.backbones import build_backbone
from training.config import AugmentConfig, ConfigError, DistillConfig, TermConfig
from training.data.identities import load_identities
from training.distillation import Distillation, load_teacher
from training.distributed import bf16_is_native
from training.export import export_recogniser
from training.finished import embedder, load_run
from training.loop import to_tensor
from training.objective import build_objective
from training.run import train_recogniser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_people(tmp_path / "people")


def test_a_pack_teaches_what_it_serves(pack: ModelPack, recogniser: Recogniser, rng: np.random.Generator) -> None:
    crops = rng.integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)
    taught = load_teacher(pack.directory)(to_tensor(crops)).numpy()
    np.testing.assert_allclose(taught, recogniser.embed(crops), atol=1e-5)
    file = load_teacher(pack.recognition.path)(to_tensor(crops)).numpy()
    np.testing.assert_allclose(file, recogniser.embed(crops), atol=1e-5)


def test_a_pack_with_crops_of_its_own_teaches_from_standard_ones(
    pack: ModelPack, recogniser: Recogniser, tmp_path: Path, rng: np.random.Generator
) -> None:
    closer = Alignment(112, tuple((1.2 * x - 11, 1.2 * y - 20) for x, y in STANDARD.template))
    copy = Path(shutil.copytree(pack.directory, tmp_path / "closer"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tasks"]["recognition"]["alignment"] = {"template": closer.template}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    crops = rng.integers(0, 255, (4, 112, 112, 3), dtype=np.uint8)
    taught = load_teacher(copy)(to_tensor(crops)).numpy()
    np.testing.assert_allclose(taught, recogniser.embed(recut(crops, closer)), atol=1e-5)
    assert np.abs(taught - recogniser.embed(crops)).max() > 0.01


def test_a_run_and_its_export_teach_the_same(folder: Path, tmp_path: Path) -> None:
    finished = train_recogniser(tiny_run(folder, tmp_path / "teacher", "cosface", epochs=1))
    crops = load_identities(tiny_run(folder, tmp_path).data, tmp_path / "cache").crops_NHWC[:12].copy()
    export_recogniser(finished.backbone, to_tensor(crops), tmp_path / "teacher.onnx", {}, "fp32")
    images = to_tensor(crops)
    by_run = load_teacher(tmp_path / "teacher")(images)
    assert not by_run.requires_grad
    assert torch.allclose(by_run, F.normalize(finished.backbone(images)), atol=1e-6)
    by_file = load_teacher(tmp_path / "teacher.onnx")(images)
    assert F.cosine_similarity(by_run, by_file).min() > (0.99 if bf16_is_native() else 0.99999)


def test_an_exported_program_teaches(tmp_path: Path) -> None:
    backbone, images = build_backbone(TINY).eval(), torch.rand(3, 3, 112, 112) * 2 - 1
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(backbone, (images,), dynamic_shapes=({0: batch},)), tmp_path / "teacher.pt2")
    taught = load_teacher(tmp_path / "teacher.pt2")(images[:2])
    assert torch.allclose(taught, F.normalize(backbone(images[:2])), atol=1e-5)


def test_a_student_comes_closer_to_its_teacher(folder: Path, tmp_path: Path) -> None:
    """Its labels say nothing (head none): only the teacher can be learned from."""
    train_recogniser(tiny_run(folder, tmp_path / "teacher", "cosface", epochs=2))
    student = replace(
        tiny_run(folder, tmp_path / "student", "none", epochs=12, learning_rate=0.02, ema_decay=0.0),
        distill=DistillConfig(tmp_path / "teacher", 2.0),
    )
    train_recogniser(student)
    curve = np.array([float(v) for _, v in losses(tmp_path / "student")])
    assert curve[-6:].mean() < 0.7 * curve[:3].mean()
    crops = load_identities(student.data, tmp_path / "cache").crops_NHWC.copy()
    taught, untaught = (
        embedder(network) for network in (load_run(tmp_path / "student")[1], build_backbone(TINY).eval())
    )
    teacher = load_teacher(tmp_path / "teacher")(to_tensor(crops)).numpy()
    assert (taught(crops) * teacher).sum(1).mean() > (untaught(crops) * teacher).sum(1).mean() + 0.2


def test_other_dimensions_are_projected_and_saved(folder: Path, tmp_path: Path, pack: ModelPack) -> None:
    config = replace(
        tiny_run(folder, tmp_path / "run", "cosface", epochs=1),
        distill=DistillConfig(pack.directory),
        terms=(TermConfig("ring", 0.01),),
    )
    train_recogniser(config)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["distillation"]["projection.weight"].shape == (pack.recognition.dimension, 16)
    assert train_recogniser(replace(config, loop=replace(config.loop, epochs=2))).step == 6


def test_the_loss_is_one_minus_the_cosine() -> None:
    wanted = F.normalize(torch.randn(3, 16))
    distillation = Distillation(lambda images: wanted[: len(images)], 16, DistillConfig())
    x = torch.randn(3, 16)
    expected = np.mean([1 - float(a @ b) / float(a.norm() * b.norm()) for a, b in zip(x, wanted, strict=True)])
    assert distillation(x, torch.zeros(3, 3, 112, 112)).item() == pytest.approx(expected, abs=1e-6)
    assert distillation(wanted * 7, torch.zeros(3, 3, 112, 112)).item() == pytest.approx(0, abs=1e-6)


def test_the_loss_is_the_mean_squared_distance() -> None:
    wanted = F.normalize(torch.randn(3, 16))
    distillation = Distillation(lambda images: wanted[: len(images)], 16, DistillConfig(match="euclidean", scale=7.0))
    x = torch.randn(3, 16)
    expected = np.mean((x.numpy() - 7 * wanted.numpy()) ** 2)
    assert distillation(x, torch.zeros(3, 3, 112, 112)).item() == pytest.approx(expected, rel=1e-5)
    assert distillation(wanted * 7, torch.zeros(3, 3, 112, 112)).item() == pytest.approx(0, abs=1e-6)


def test_where_batches_recur_the_teacher_is_asked_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Tensor] = []

    def teacher(images_BCHW: Tensor) -> Tensor:
        asked.append(images_BCHW.clone())
        return F.normalize(images_BCHW.flatten(1)[:, :16] + 0.1)

    monkeypatch.setattr("training.objective.load_teacher", lambda _: teacher)
    config = replace(
        tiny_run(folder, tmp_path / "run", "none", epochs=6),
        distill=DistillConfig(folder, match="euclidean", views=2),
        augment=AugmentConfig(morph=0.5),
    )
    steps = train_recogniser(config).step
    real = [images for images in asked if len(images) > 1]  # one image of zeros asks for the dimension
    assert len(real) == steps // 3
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(real, 2))


def test_blends_say_nothing_of_labels(folder: Path, tmp_path: Path) -> None:
    """The head sees the others alone: with all images blended there is nothing for it."""
    config = tiny_run(folder, tmp_path / "run", "cosface", epochs=1)
    objective = build_objective(config, 8)
    embeddings, labels = torch.randn(6, 16), torch.tensor([0, 1, 2, 3, 4, 5])
    labelled = torch.tensor([True, False, True, True, False, False])
    part = objective(embeddings, labels, torch.zeros(6, 3, 112, 112), labelled)["head"]
    assert torch.equal(part, objective.head(embeddings[labelled], labels[labelled]))


def test_what_cannot_teach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    for path in (tmp_path / "empty", tmp_path / "broken.onnx"):
        with pytest.raises(ConfigError, match=r"distill\.teacher"):
            load_teacher(path)
