"""Students learn the maps of a residual teacher block by block, then its mean embedding of image and mirror image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch.nn import functional as F

from models.pack.dlib_pack import dlib_alignment
from models.pack.dlib_resnet import to_onnx
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import realign_crops
from models.vision.recognition import l2_normalize
from models.vision.specs import Normalization
from tests.models.pack.dlib_format import small_network
from tests.training.runs import PLAIN, STEPS_PER_EPOCH, losses, tiny_run, write_people
from training.backbones.chip_resnet import DEPTHS, LAST_BLOCKS, WIDTHS, ChipResNet
from training.config import BackboneConfig, ConfigError, DistillConfig, TermConfig
from training.data.identities import hold_out, load_identities
from training.optimization.distillation import Distillation, ResidualTeacher
from training.optimization.loop import to_tensor
from training.optimization.onnx_module import OnnxModule, is_convolutional
from training.run.train import train_recognizer


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ONNX file with the layers of dlib's network and random weights."""
    blocks = [
        (width, stage > 0 and index == 0)
        for stage, (width, depth) in enumerate(zip(WIDTHS, DEPTHS, strict=True))
        for index in range(depth)
    ]
    writer = small_network(np.random.default_rng(3), np.zeros((1, 3, 150, 150), np.float32), blocks, stem=WIDTHS[0])
    model = to_onnx(writer.content())
    # Random blocks of this depth would overflow bfloat16.
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 4 and tensor.dims[2] in (3, 7):
            values = onnx.numpy_helper.to_array(tensor)
            scaled = values * (0.5 / np.sqrt(values[0].size) / values.std())
            tensor.CopyFrom(onnx.numpy_helper.from_array(scaled.astype(np.float32), tensor.name))
    path = tmp_path_factory.mktemp("teacher") / "dlib.onnx"
    onnx.save(model, str(path))
    return path


@pytest.fixture
def teacher(network: Path, monkeypatch: pytest.MonkeyPatch) -> ResidualTeacher:
    monkeypatch.setattr("training.distributed.has_native_bf16", lambda: False)
    return ResidualTeacher(OnnxModule(network), Normalization(0.0, 1.0), dlib_alignment())


@pytest.fixture
def crops(rng: np.random.Generator) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    coarse = rng.integers(0, 255, (4, 3, 14, 14)).astype(np.float32)
    smooth = F.interpolate(torch.from_numpy(coarse), size=(112, 112), mode="bilinear")
    return smooth.permute(0, 2, 3, 1).round().to(torch.uint8).numpy()


def test_torch_computes_the_onnx_network_and_its_maps(network: Path, rng: np.random.Generator) -> None:
    images = rng.uniform(0, 255, (2, 3, 150, 150)).astype(np.float32)
    module = OnnxModule(network)
    vectors, maps = module(torch.from_numpy(images))
    np.testing.assert_allclose(vectors, OnnxNetwork(network).run(images)[0], rtol=1e-3, atol=1e-4)
    assert len(maps) == sum(DEPTHS) + 1
    shown = onnx.load(str(network))
    shown.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in module.block_maps
    )
    session = onnxruntime.InferenceSession(shown.SerializeToString())
    for found, expected in zip(maps, session.run(None, {"input": images})[1:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_other_operators_are_named(tmp_path: Path) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"])
    sides = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3]) for name in ("x", "y")]
    onnx.save(helper.make_model(helper.make_graph([node], "g", sides[:1], sides[1:])), str(tmp_path / "other.onnx"))
    assert not is_convolutional(tmp_path / "other.onnx")
    with pytest.raises(ConfigError, match="torch cannot run Softmax"):
        OnnxModule(tmp_path / "other.onnx")


def test_the_teacher_embeds_as_served(network: Path, teacher: ResidualTeacher, crops: np.ndarray) -> None:
    chips = realign_crops(crops, dlib_alignment()).transpose(0, 3, 1, 2).astype(np.float32)
    expected = l2_normalize(OnnxNetwork(network).run(chips)[0])
    cosines = (teacher(to_tensor(crops)).numpy() * expected).sum(1)
    assert cosines.min() > 0.9995  # serving rounds the enlarged crop to whole levels


def test_the_student_cuts_the_teachers_chip(crops: np.ndarray) -> None:
    chips = ChipResNet().cut_chip(to_tensor(crops)) * 127.5 + 127.5
    expected = realign_crops(crops, dlib_alignment()).transpose(0, 3, 1, 2)
    assert np.abs(chips.numpy() - expected).mean() < 0.5


def test_student_and_teacher_have_equal_maps(teacher: ResidualTeacher, crops: np.ndarray) -> None:
    student = ChipResNet().eval()
    values = student.maps(to_tensor(crops))
    _, maps = teacher.embed_with_maps(to_tensor(crops))
    assert [v.shape for v in values] == [m.shape for m in maps]
    torch.testing.assert_close(student.head(values[-1]), student(to_tensor(crops)))
    assert [tuple(values[i].shape[1:]) for i in LAST_BLOCKS] == [
        (32, 35, 35),
        (64, 17, 17),
        (128, 8, 8),
        (256, 4, 4),
        (256, 2, 2),
    ]


def test_blocks_learn_on_their_own(teacher: ResidualTeacher, crops: np.ndarray) -> None:
    """No gradient crosses a block, and the loss falls."""
    torch.manual_seed(0)
    student, images = ChipResNet(), to_tensor(crops)
    distillation = Distillation(teacher, 128, DistillConfig(match="euclidean", scale=29.0))
    _, maps = teacher.embed_with_maps(images)
    assert not any(m.requires_grad for m in maps)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    curve = []
    for _ in range(12):
        embeddings, loss = distillation.imitate_blocks(student, images)
        assert embeddings.shape == (4, 128)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        curve.append(float(loss.detach()))
    assert curve[-1] < 0.7 * curve[0]
    assert all(p.grad is not None for p in student.parameters())


def test_maps_are_a_weighted_part_of_the_loss(teacher: ResidualTeacher, crops: np.ndarray) -> None:
    torch.manual_seed(0)
    student, images = ChipResNet().eval(), to_tensor(crops)
    config = DistillConfig(Path(), match="euclidean", scale=29.0, mirror=True, map_weight=2.0)
    distillation = Distillation(teacher, 128, config)
    embeddings, loss = distillation.imitate_stages(student, images)
    _, maps = teacher.embed_with_maps(images)
    own = student.maps(images)
    errors = [float(((own[i] - maps[i]) ** 2).mean().detach() / maps[i].var()) for i in LAST_BLOCKS]
    torch.testing.assert_close(embeddings, student(images))
    assert float(loss.detach()) == pytest.approx(
        float(distillation(embeddings, images).detach()) + 2 * np.mean(errors), rel=1e-4
    )


def test_the_mirror_image_is_averaged(teacher: ResidualTeacher, crops: np.ndarray) -> None:
    images = to_tensor(crops)
    distillation = Distillation(teacher, 128, DistillConfig(Path(), match="euclidean", scale=2.0, mirror=True))
    wanted = 2 * F.normalize((teacher(images) + teacher(images.flip(3))) / 2)
    assert float(distillation(wanted, images)) == pytest.approx(0, abs=1e-9)
    assert float(distillation(wanted, images.flip(3))) == pytest.approx(0, abs=1e-9)
    moved = wanted + torch.arange(128) / 64
    assert float(distillation(moved, images)) == pytest.approx(
        float((torch.arange(128) / 64).square().mean()), rel=1e-4
    )


def test_a_run_starts_by_block_and_resumes(
    teacher: ResidualTeacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.optimization.objective.load_teacher", lambda _: teacher)
    folder = write_people(tmp_path / "people")
    config = replace(
        tiny_run(folder, tmp_path / "run", "none", epochs=2, optimizer="adamw", learning_rate=1e-3),
        backbone=BackboneConfig("chip_resnet", embedding_dim=128),
        augment=PLAIN,
        distill=DistillConfig(
            folder, match="euclidean", scale=29.0, mirror=True, block_steps=3, map_weight=1.0, held_out=4
        ),
    )
    finished = train_recognizer(config)
    assert finished.step == 4  # 20 of 24 images in batches of 8, two epochs
    assert len(losses(tmp_path / "run")) == 4
    logged = (tmp_path / "run" / "validation.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in logged[1:]] == ["held-out distillation loss"] * 2
    assert train_recognizer(replace(config, loop=replace(config.loop, epochs=3))).step == 6


def test_held_out_images_are_not_trained_on(tmp_path: Path) -> None:
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run").data
    whole = load_identities(config, tmp_path / "cache")
    rest, held = hold_out(whole, 5, seed=2)
    assert (len(rest), len(held), rest.num_classes) == (len(whole) - 5, 5, whole.num_classes)
    seen = {crop.tobytes() for crop in rest.crops_NHWC[np.arange(len(rest))]}
    assert not seen & {crop.tobytes() for crop in held}
    streamed, again = hold_out(load_identities(replace(config, workers=1), tmp_path / "cache"), 5, seed=2)
    np.testing.assert_array_equal(again, held)
    np.testing.assert_array_equal(streamed.crops_NHWC[np.arange(3)], rest.crops_NHWC[np.arange(3)])
    assert hold_out(whole, 0, seed=2)[0] is whole
    with pytest.raises(ConfigError, match="leaves none"):
        hold_out(whole, len(whole), seed=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_steps": 5}, "needs a distill.teacher"),
        ({"mirror": True}, "needs a distill.teacher"),
        ({"held_out": 5}, "needs a distill.teacher"),
        ({"held_out": -1}, "number of images"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillConfig(**settings)  # type: ignore[arg-type]


def test_blocks_need_the_teachers_shape(tmp_path: Path) -> None:
    folder = write_people(tmp_path / "people")
    with pytest.raises(ConfigError, match=r"backbone\.name chip_resnet"):
        replace(tiny_run(folder, tmp_path, "none"), distill=DistillConfig(folder, block_steps=2))
    plain = replace(tiny_run(folder, tmp_path, "none"), backbone=BackboneConfig("chip_resnet", embedding_dim=128))
    with pytest.raises(ConfigError, match="no terms"):
        replace(plain, terms=(TermConfig("triplet"),), distill=DistillConfig(folder, map_weight=1.0))
    distillation = Distillation(lambda images: F.normalize(images.flatten(1)[:, :128] + 1), 128, DistillConfig())
    with pytest.raises(ConfigError, match="plain residual network"):
        distillation.imitate_blocks(ChipResNet(), torch.zeros(2, 3, 112, 112))


def test_checkpoints_have_the_projection_but_not_the_teacher(
    teacher: ResidualTeacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.optimization.objective.load_teacher", lambda _: teacher)
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "none", epochs=1)
    config = replace(config, distill=DistillConfig(tmp_path, match="euclidean"))
    path = train_recognizer(config).path
    state = torch.load(path, weights_only=True)
    assert set(state["distillation"]) == {"projection.weight"}
    # A checkpoint of an earlier version.
    torch.save({**state, "distillation": {**state["distillation"], "teacher.to_crop": teacher.to_crop}}, path)
    assert train_recognizer(replace(config, loop=replace(config.loop, epochs=2))).step == 2 * STEPS_PER_EPOCH
