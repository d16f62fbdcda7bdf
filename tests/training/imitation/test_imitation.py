"""A student learns the maps of its teacher, block by block."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from models.errors import ModelError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.open_model_zoo import ALIGNMENT
from models.vision.detection import Detector
from models.vision.specs import Normalization, RecognitionSpec
from training.backbones import BottleneckNet
from training.backbones.bottleneck_net import SIDE_PX, Stem
from training.config import ConfigError
from training.imitation.blocks import BlockFit, fit_blocks
from training.imitation.joint import JointFit, fit_student, imitation_loss
from training.imitation.run import imitate
from training.imitation.teacher import GraphNetwork, Teacher, TorchTeacher
from training.imitation.views import (
    MARGIN_PX,
    Portraits,
    cut_portraits,
    draw_crops,
    head_turns,
    make_view,
    mirror_points,
    widen,
)
from training.optimization.run_folder import CHECKPOINT, load_ema_weights, save_step
from training.recipes import imitated

Photo = NDArray[np.uint8]
PARTS = 17


class Pixels(nn.Module):
    """The parts of a student on BGR pixels in 0..255, as a teacher takes them."""

    def __init__(self, network: BottleneckNet) -> None:
        super().__init__()
        self.parts = network.parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts((x - 127.5) / 127.5)
        return out


def spec_of(path: Path) -> RecognitionSpec:
    return RecognitionSpec(path, None, Normalization(0.0, 1.0, "BGR"), ALIGNMENT, 16, "test")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pixels, Path]:
    """A teacher with random weights, and its ONNX file."""
    torch.manual_seed(7)
    network = Pixels(BottleneckNet(16)).eval()
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    example = torch.zeros(2, 3, SIDE_PX, SIDE_PX)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export uses its own deprecated functions
        program = torch.onnx.export(network, (example,), dynamo=True, dynamic_shapes=(batch,), verbose=False)
    assert program is not None
    program.save(path)
    return network, path


@pytest.fixture(scope="module")
def portraits() -> Portraits:
    rng = np.random.default_rng(5)
    side = SIDE_PX + 2 * MARGIN_PX
    small = rng.integers(0, 256, (24, 10, 10, 3), dtype=np.uint8)
    crops = [np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)) for pixels in small]
    detected = widen(ALIGNMENT).template_xy + rng.normal(size=(24, 5, 2)) * 4
    return Portraits(np.stack(crops), detected.astype(np.float32))


def test_a_teacher_is_cut_between_its_blocks(published: tuple[Pixels, Path], rng: np.random.Generator) -> None:
    network, path = published
    teacher = Teacher(spec_of(path))
    views = rng.integers(0, 256, (3, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    x = teacher.prepare(views)
    np.testing.assert_array_equal(x, views[..., ::-1].transpose(0, 3, 1, 2))
    expected = (torch.from_numpy(x) - 127.5) / 127.5
    engine = teacher.maps(torch.from_numpy(views))
    on_torch = TorchTeacher(spec_of(path), torch.device("cpu"), torch.float32).maps(torch.from_numpy(views))
    assert len(engine) == len(on_torch) == PARTS
    for part, block in enumerate(network.parts):
        x = np.asarray(teacher.advance(part, x), np.float32)
        with torch.no_grad():
            expected = block(expected)
        np.testing.assert_allclose(x, expected.numpy(), atol=2e-4, err_msg=str(part))
        torch.testing.assert_close(on_torch[part], expected, atol=2e-4, rtol=1e-3)
        # The whole teacher may compute in bf16.
        error = np.square(engine[part].numpy() - expected.numpy()).mean() / expected.numpy().var()
        assert error < 1e-3, part


@pytest.mark.parametrize(
    ("operator", "attributes", "expected"),
    [
        ("LeakyRelu", {"alpha": 0.2}, [[-0.2, 2.0]]),
        ("Flatten", {}, [[-1.0, 2.0]]),
        ("ReduceMean", {"keepdims": 0, "axes": [1]}, [0.5]),
    ],
)
def test_operators_follow_their_attributes(operator: str, attributes: dict[str, Any], expected: list[Any]) -> None:
    node = onnx.helper.make_node(operator, ["x"], ["y"], **attributes)
    assert GraphNetwork(model_of(node), ["y"])(torch.tensor([[-1.0, 2.0]]))[0].tolist() == [
        pytest.approx(value) for value in expected
    ]


def test_unknown_operators_are_named() -> None:
    with pytest.raises(ModelError, match=r"does not compute here: Erf\. Set CUDA"):
        GraphNetwork(model_of(onnx.helper.make_node("Erf", ["x"], ["y"])), ["y"])


def model_of(node: onnx.NodeProto) -> onnx.ModelProto:
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y")]
    return onnx.helper.make_model(onnx.helper.make_graph([node], "one", values[:1], values[1:]))


def test_another_network_is_no_teacher() -> None:
    with pytest.raises(ModelError, match="no bottlenecks"):
        Teacher(spec_of(BUNDLED_PACK / "detector.onnx"))


@pytest.mark.long
def test_blocks_learn_and_a_run_that_was_cut_off_goes_on(
    published: tuple[Pixels, Path], portraits: Portraits, tmp_path: Path
) -> None:
    teacher = Teacher(spec_of(published[1]))
    fits = (BlockFit(blocks=2, steps=24, views=16, weight_decay=0.1, start_steps=5),)
    few = portraits.select(np.arange(6))

    def run(fits: tuple[BlockFit, ...], output: Path) -> BottleneckNet:
        torch.manual_seed(0)
        student = BottleneckNet(16)
        output.mkdir(exist_ok=True)
        fit_blocks(student, teacher, portraits, few, fits, output, seed=0)
        return student

    whole = run(fits, tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "blocks.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == [0, 1]
    assert all(row["error"] < 0.8 for row in rows)
    run((replace(fits[0], blocks=1),), tmp_path / "cut")
    resumed = run(fits, tmp_path / "cut")
    for one, other in zip(whole.parts[:1].parameters(), resumed.parts[:1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    again = [json.loads(line) for line in (tmp_path / "cut" / "blocks.jsonl").read_text().splitlines()]
    assert [row["part"] for row in again] == [0, 1]
    # Maps that are computed at once are rounded otherwise than maps that are stored between blocks.
    assert again[1]["error"] == pytest.approx(rows[1]["error"], rel=0.3)


def test_whitening_changes_only_coordinates(rng: np.random.Generator) -> None:
    images = torch.from_numpy(rng.normal(size=(8, 3, SIDE_PX, SIDE_PX)).astype(np.float32)).cumsum(3) / 10
    stem = Stem(8, nn.Identity())
    stem.whiten(images)
    patches = torch.nn.functional.unfold(images, 3, stride=7).transpose(1, 2).reshape(-1, 27)
    covariance = torch.cov((patches @ stem.whitening.T).T)
    # Variances below the floor stay small; all others are one.
    values = torch.linalg.eigvalsh(covariance)
    assert float(values.max()) == pytest.approx(1, abs=0.01)


def test_views_stay_near_the_template(portraits: Portraits) -> None:
    sharp = Portraits(portraits.crops, np.tile(widen(ALIGNMENT).template_xy, (24, 1, 1)).astype(np.float32))
    (batch,) = draw_crops(sharp, ALIGNMENT, 8, seed=3)
    (again,) = draw_crops(sharp, ALIGNMENT, 8, seed=3)
    np.testing.assert_array_equal(batch, again)
    assert batch.shape == (8, SIDE_PX, SIDE_PX, 3)
    center = portraits.crops[0][MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX].astype(int)
    one = sharp.select(np.array([0]))
    views = np.concatenate(list(draw_crops(one, ALIGNMENT, 60, seed=0)))
    distances = [min(np.abs(center - v).mean(), np.abs(center[:, ::-1] - v).mean()) for v in views]
    others = [
        np.abs(center - other[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX]).mean() for other in portraits.crops[1:]
    ]
    assert np.median(distances) < min(others)


def test_landmarks_move_with_the_photo() -> None:
    """A white square on the left eye is near that landmark of a view, in the mirror image as well."""
    side, points = SIDE_PX + 2 * MARGIN_PX, widen(ALIGNMENT).template_xy
    crop = np.zeros((side, side, 3), np.uint8)
    column, row = np.round(points[0]).astype(int)
    crop[row - 6 : row + 7, column - 6 : column + 7] = 255
    rng, mirrored, found = np.random.default_rng(0), 0, 0
    for _ in range(60):
        view = make_view(crop, points, ALIGNMENT, rng)
        bright = view.photo.astype(float).mean(2)
        rows, columns = np.nonzero(bright > 0.7 * bright.max())
        center = np.array([columns.mean(), rows.mean()])
        eye = 1 if center[0] > side / 2 else 0
        mirrored += eye
        found += bool(np.linalg.norm(view.landmarks_xy[eye] - center) < 12)
    assert 15 < mirrored < 45
    assert found > 50  # else something that covers the photo is brighter
    np.testing.assert_allclose(mirror_points(mirror_points(points, side), side), points)


def test_turned_heads_are_drawn_more_often(portraits: Portraits) -> None:
    front = widen(ALIGNMENT).template_xy
    turned = front.copy()
    turned[2] += (40, 0)  # the nose beside the line between eyes and mouth
    assert head_turns(np.stack([front, turned])).tolist() == pytest.approx([0.0, 0.6], abs=0.3)
    both = replace(portraits, detected=np.stack([front] * 20 + [turned] * 4).astype(np.float32))
    assert both.chances[20:].sum() == pytest.approx(3 * 4 / (20 + 3 * 4))
    assert both.chances.sum() == pytest.approx(1)


def test_portraits_are_cut_as_the_teacher_wants_them(detector: Detector, astronaut: Photo, tmp_path: Path) -> None:
    Image.fromarray(astronaut).save(tmp_path / "face.png")
    Image.fromarray(np.full((200, 200, 3), 128, np.uint8)).save(tmp_path / "none.png")
    files, cache, companion = sorted(tmp_path.iterdir()), tmp_path / "crops.npy", tmp_path / "detected.npy"
    cut_portraits(files, detector, detector, ALIGNMENT, cache, companion)
    crops, detected = np.load(cache), np.load(companion)
    assert Portraits(crops, detected).found.tolist() == [0]
    assert head_turns(detected[:1])[0] < 0.25  # she faces the camera
    assert np.abs(detected[0] - widen(ALIGNMENT).template_xy).mean() < 4
    assert crops.shape == (2, SIDE_PX + 2 * MARGIN_PX, SIDE_PX + 2 * MARGIN_PX, 3)
    (faces,) = detector.detect([crops[0]])
    points = faces.landmarks_xy[faces.largest()] - MARGIN_PX
    assert np.abs(points - ALIGNMENT.template_xy).mean() < 4


def test_packs_with_other_crops_are_no_teachers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has crops of 112 pixels"):
        imitate(imitated(tmp_path, tmp_path / "run", BUNDLED_PACK), load_pack(BUNDLED_PACK).detection)


def test_equal_maps_lose_nothing_and_others_what_they_differ(rng: np.random.Generator) -> None:
    maps = [torch.from_numpy(rng.normal(size=(4, 6)).astype(np.float32)) for _ in range(PARTS)]
    assert float(imitation_loss(maps, maps, [1.0] * PARTS)) == pytest.approx(0, abs=1e-6)
    first, late = ([m + (i == part) for i, m in enumerate(maps)] for part in (0, 9))
    assert float(imitation_loss(first, maps, [1.0] * PARTS)) == pytest.approx(0, abs=1e-6)
    assert float(imitation_loss(late, maps, [0.5] * PARTS)) == pytest.approx(0.7 * 0.5)
    opposite = [*maps[:-1], -maps[-1]]
    assert float(imitation_loss(opposite, maps, [1.0] * PARTS)) == pytest.approx(2)


@pytest.mark.long
def test_a_whole_student_learns_and_goes_on_as_if_it_had_not_been_cut_off(
    published: tuple[Pixels, Path], portraits: Portraits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(spec_of(published[1]))
    few = portraits.select(np.arange(6))

    def run(output: Path, workers: int = 0) -> list[dict[str, float]]:
        torch.manual_seed(0)
        output.mkdir(exist_ok=True)
        fit = JointFit(8, 4, save_steps=4, workers=workers, compiled=False)
        fit_student(BottleneckNet(16), teacher, portraits, few, fit, output, seed=0)
        return [json.loads(line) for line in (output / "joint.jsonl").read_text().splitlines()]

    def fail(*arguments: Any) -> None:
        save_step(*arguments)
        raise KeyboardInterrupt

    rows = run(tmp_path / "whole", workers=1)
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.02
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("training.imitation.joint.save_step", fail)
        run(tmp_path / "cut")
    again = run(tmp_path / "cut")
    assert [row["step"] for row in again] == [4, 8]
    one, other = (load_ema_weights(tmp_path / name / CHECKPOINT) for name in ("whole", "cut"))
    torch.testing.assert_close(one, other)
    assert run(tmp_path / "whole") == rows  # a finished run is left as it is


@pytest.mark.long
def test_a_student_imitates_the_published_network(reference: Path, data: Path, tmp_path: Path) -> None:
    """One short run from photos to weights, with the teacher of the bundled recognizer."""
    from models.pack.open_model_zoo import build_open_model_zoo_pack, describe_source

    folder = tmp_path / "pack"
    folder.mkdir()
    xml, weights, yunet = (reference / name for name in ("retail0095.xml", "retail0095.bin", "detector_yunet.onnx"))
    source = describe_source(weights, "here", "Apache-2.0")
    pack = build_open_model_zoo_pack(folder, xml, weights, yunet, {"recognizer": source, "detector": source})
    photos = tmp_path / "photos"
    photos.mkdir()
    for file in sorted((data / "scenes" / "images").iterdir())[:40]:
        (photos / file.name).write_bytes(file.read_bytes())
    fits = (BlockFit(blocks=2, steps=60, views=48, weight_decay=0.1, start_steps=5),)
    config = imitated(photos, tmp_path / "run", pack.directory)
    config = replace(config, distill=replace(config.distill, held_out=10))
    student = imitate(config, pack.detection, fits, JointFit(steps=4, batch_size=4, compiled=False))
    rows = [json.loads(line) for line in (config.output / "blocks.jsonl").read_text().splitlines()]
    assert rows[1]["error"] < 0.6
    assert sum(p.numel() for p in student.parts.parameters()) == pytest.approx(1_107_064, abs=0)
    saved = load_ema_weights(config.output / CHECKPOINT)
    torch.testing.assert_close(saved, dict(student.state_dict()))
    with pytest.raises(ConfigError, match=r"started with other settings \(distill.held_out\)"):
        imitate(imitated(photos, config.output, pack.directory), pack.detection, fits)
    with pytest.raises(ConfigError, match="are held out"):
        imitate(imitated(photos, tmp_path / "other", pack.directory), pack.detection, fits)
    assert onnx.load(pack.recognition.path).graph.output[0].name == "embedding"
