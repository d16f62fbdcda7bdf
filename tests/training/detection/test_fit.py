"""A detector learns to compute what its teacher does."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim

from models.errors import ModelError
from models.pack.manifest import ModelPack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector, SCRFDHead, YuNetHead
from models.vision.specs import DetectionSpec, Normalization
from training.detection.crops import Photo, Photos
from training.detection.fit import (
    BLOCKS,
    DETECTOR_CHECKPOINT,
    ERRORS,
    DetectorFit,
    draw_crops,
    fit_part,
    output_loss,
    to_tensor,
)
from training.detection.network import STRIDES, FaceDetector, separable, served_score
from training.detection.teacher import KINDS, DetectorTeacher, find_maps, find_outputs
from training.optimization.descent import Descent
from training.run.train import train_detector

TINY = DetectorFit(crops=40, block_steps=12, neck_steps=6, joint_steps=4, joint_batch=2, save_steps=2)


@pytest.fixture(scope="module")
def photos(astronaut: NDArray[np.uint8], detector: Detector) -> Photos:
    photo = Photo(astronaut, detector.detect([astronaut])[0].boxes_xyxy[:1])
    return Photos([photo], [photo], [Photo(astronaut[300:, :150], np.zeros((0, 4), np.float32))])


class YuNet(nn.Module):
    """A detector with YuNet's input and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = FaceDetector()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels = self.network.neck(self.network.maps(x.flip(1))[-3:])
        kinds = [[y.permute(0, 2, 3, 1).flatten(1, 2) for y in kind] for kind in zip(*levels, strict=True)]
        return (*(y.sigmoid() for kind in kinds[:2] for y in kind), *(y for kind in kinds[2:] for y in kind))


@pytest.fixture(scope="module")
def yunet(pack: ModelPack, tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    """The bundled pack with another detector, whose weights are random."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("yunet") / "yunet.onnx"
    names = [f"{kind}_{stride}" for kind in KINDS for stride in STRIDES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            YuNet().eval(), (torch.rand(2, 3, 320, 320),), str(path), input_names=["input"], output_names=names,
            dynamo=True, external_data=False, verbose=False, dynamic_shapes=({0: Dim("batch", min=1, max=64)},),
        )  # fmt: skip
    return replace(pack, detection=DetectionSpec(path, None, Normalization(0.0, 1.0, "BGR"), "yunet"))


@pytest.fixture(scope="module")
def teacher(yunet: ModelPack, photos: Photos) -> DetectorTeacher:
    return DetectorTeacher(yunet.detection, draw_crops(photos, 20, 5, 0))


def test_the_teacher_gives_maps_of_unit_variance_and_outputs_before_the_sigmoid(
    teacher: DetectorTeacher, yunet: ModelPack, photos: Photos
) -> None:
    crops = draw_crops(photos, 20, 5, 0)
    maps, outputs = teacher.run(crops)
    assert [tuple(y.shape[1:]) for y in maps] == [
        (16, 160, 160), (64, 80, 80), (64, 80, 80), (64, 40, 40), (64, 20, 20), (64, 10, 10),
    ]  # fmt: skip
    for y in maps:
        spread = y.std((0, 2, 3))
        alive = spread > 0.01  # some are dead, as the weights are random
        assert alive.float().mean() > 0.3
        assert ((spread[alive] - 1).abs() < 0.01).all()
    assert [[y.shape[1] for y in level] for level in outputs] == [[1, 1, 4, 10]] * 3
    scores = OnnxNetwork(yunet.detection.path).run(crops[..., ::-1].transpose(0, 3, 1, 2).astype(np.float32))[0]
    assert np.allclose(outputs[0][0].sigmoid().flatten(1), scores[..., 0], atol=1e-4)


def test_scores_keep_their_middle_and_photos_count_as_upright_as_with_scrfd() -> None:
    logits = torch.logit(torch.tensor([0.5, 0.9]))
    assert served_score(logits, logits).tolist() == pytest.approx([0.5, SCRFDHead.upright_score], abs=0.005)


def test_outputs_are_decoded_to_the_faces_of_the_teacher() -> None:
    """The same numbers read as YuNet's and as SCRFD's are the same boxes and points."""
    torch.manual_seed(2)
    model = YuNet().eval()
    x = torch.rand(1, 3, 64, 96) * 255
    with torch.no_grad():
        theirs, ours = model(x), model.network((x.flip(1) - 127.5) / 128)
    names = [f"{kind}_{stride}" for kind in KINDS for stride in STRIDES]
    expected = YuNetHead(names).decode([y[0].numpy() for y in theirs], 96, 1e-6)
    found = SCRFDHead(9).decode([y[0].numpy() for y in ours], 96, 1e-3)
    assert np.allclose(found.boxes, expected.boxes, atol=1e-2)
    assert np.allclose(found.landmarks, expected.landmarks, atol=1e-2)


def test_a_detector_that_is_no_yunet_cannot_teach() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y]))
    assert isinstance(model, onnx.ModelProto)
    with pytest.raises(ModelError, match="too few activations"):
        find_maps(model)
    with pytest.raises(ModelError, match="no output bbox_16"):
        find_outputs(model)


def test_a_detector_with_the_teachers_outputs_has_no_loss(teacher: DetectorTeacher, photos: Photos) -> None:
    _, taught = teacher.run(draw_crops(photos, 10, 6, 0))
    assert float(output_loss(taught, taught)) == pytest.approx(0, abs=1e-5)
    for kind, moved in ((0, -4.0), (1, -4.0), (2, 0.5), (3, 0.5)):
        own = [[y + moved * (number == kind) for number, y in enumerate(level)] for level in taught]
        assert float(output_loss(own, taught)) > 0.1


def test_a_block_learns_also_what_its_teacher_does_at_the_border() -> None:
    torch.manual_seed(0)
    true, own = (separable(3, 4) for _ in range(2))
    maps = torch.rand(30, 3, 40, 40) + 2
    with torch.no_grad():
        taught = true(maps)
    fit = DetectorFit(block_steps=1500)
    assert fit_part(own, maps, taught, Descent(own, 0.02, 0.02, 0.0, fit.block_steps), fit, 0) < 0.01
    with torch.no_grad():
        difference = (own(maps) - taught).abs()
    assert float(difference[:, :, 0].mean()) < 0.2
    assert float(difference[:, :, 20, 20].mean()) < 0.2


@pytest.mark.long
def test_a_run_goes_on_where_it_was_cut_off(yunet: ModelPack, photos: Photos, tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = train_detector(photos, yunet, tmp_path / "whole", TINY)
    first = json.loads((tmp_path / "whole" / ERRORS).read_text().splitlines()[0])
    assert first["part"] == 0
    assert 0 < first["error"] < 3
    (tmp_path / "whole" / DETECTOR_CHECKPOINT).unlink()
    again = train_detector(photos, yunet, tmp_path / "whole", TINY)
    image = to_tensor(draw_crops(photos, 1, 7, 0)).float()
    with torch.no_grad():
        for a, b in zip(whole(image), again(image), strict=True):
            assert torch.allclose(a, b, atol=1e-3)
    rows = (tmp_path / "whole" / ERRORS).read_text().splitlines()
    assert len(rows) == len(FaceDetector().parts) + 1 + 2 * 2
    assert (tmp_path / "whole" / BLOCKS).is_file()
