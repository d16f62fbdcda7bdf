"""Networks of crops other than 112x112: the size goes from data.crop_px through training and export to the service."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from kith import Kith
from models.pack.manifest import ModelPack
from models.pack.writing import write_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.alignment import STANDARD_ALIGNMENT, align, realign_crops, standard_alignment
from models.vision.detection import Detector
from models.vision.quality import measure_quality
from models.vision.recognition import Recognizer
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.training.runs import TINY, as_set, tiny_run, with_mirror
from training.cli.commands import app
from training.config import AugmentConfig, RunConfig
from training.data.augment import augment, draw_uniforms
from training.data.identities import load_identities
from training.evaluation.embedding import load_embedder, teacher_embeddings
from training.export.packing import manifest_tasks
from training.optimization.loop import to_tensor
from training.optimization.run_folder import load_run
from training.run.people import measure_folder, own_photos
from training.run.train import train_recognizer

SIDE = 144
ALIGNMENT = standard_alignment(SIDE)


@pytest.fixture
def photos(tmp_path: Path, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8]) -> Path:
    """Two people, with four photos of different light each."""
    for name, photo in (("eileen", astronaut), ("tom", actor)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            darker = np.clip(photo * (1 - 0.1 * i), 0, 255).astype(np.uint8)
            cv2.imwrite(str(tmp_path / "photos" / name / f"{i}.png"), darker[..., ::-1])
    return tmp_path / "photos"


def run_of_size(data: Path, output: Path) -> RunConfig:
    config = tiny_run(data, output, "cosface", epochs=1)
    config = replace(config, loop=replace(config.loop, batch_size=4))
    return replace(config, data=replace(config.data, crop_px=SIDE, aligned=False))


def test_a_network_of_other_crops_is_trained_exported_and_served(
    photos: Path, tmp_path: Path, pack: ModelPack, detector: Detector, astronaut: NDArray[np.uint8]
) -> None:
    run, made = tmp_path / "runs" / "large", tmp_path / "pack"
    train_recognizer(run_of_size(photos, run), detector)
    config, backbone = load_run(run)
    crops = load_identities(config.data, run.parent / "cache").crops_NHWC
    assert crops.shape == (8, SIDE, SIDE, 3)
    (landmarks,) = (detector.detect([astronaut])[0].landmarks_xy[:1],)
    assert np.array_equal(crops[0], align(astronaut, landmarks, ALIGNMENT)[0])

    # The file states its input, and evaluates as the run does.
    made.mkdir()
    file = made / "recognizer.onnx"
    app(["export", str(run), "--output", str(file), "--precision", "fp32"], standalone_mode=False)
    assert OnnxNetwork(file).input_shape[1:] == (3, SIDE, SIDE)
    for path in (run, file):
        embed, alignment = load_embedder(path)
        assert alignment == ALIGNMENT
        assert embed(np.array(crops[:2])).shape == (2, TINY.embedding_dim)

    # The manifest states the size, and the service aligns at it.
    shutil.copyfile(pack.detection.path, made / "detector.onnx")
    written = write_pack(made, "large", "Large", manifest_tasks(SIDE, TINY.embedding_dim), {}, {}, {})
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["tasks"]["recognition"]["input_size"] == [SIDE, SIDE]
    assert written.recognition.alignment == ALIGNMENT
    del manifest["calibration"]  # there is none: eight photos are no evidence
    (made / "manifest.json").write_text(json.dumps(manifest))
    settings = load_settings(pack=made, data_dir=tmp_path / "data", log_level="WARNING", runtime="onnxruntime")
    with embedded(settings) as url, Kith(url) as kith:
        (face,) = kith.embed(jpeg(astronaut, 100)).images[0].faces
    with torch.no_grad():
        (expected,) = F.normalize(backbone(to_tensor(align(astronaut, landmarks, ALIGNMENT)))).numpy()
    assert float(np.array(face.embedding) @ expected) > 0.999  # the photo was a JPEG
    usual = measure_quality(align(astronaut, landmarks)[0], landmarks[0])  # whatever the recognizer's crops
    assert face.quality.sharpness == pytest.approx(usual.sharpness, rel=0.03)
    # Evaluation of photos aligns at the size; the run, the file and the pack measure the same.
    found = [
        measure_folder(*load_embedder(path), detector, own_photos(photos, aligned=False), tmp_path / "cache")
        for path in (run, file, made)
    ]
    assert found[0].data.crops_NHWC[:].shape == (8, SIDE, SIDE, 3)
    rates = [{name: np.ravel(rate)[0] for name, rate in one.result.rates.items()} for one in found]
    assert rates[1] == pytest.approx(rates[0], nan_ok=True)
    assert rates[2] == pytest.approx(rates[0], nan_ok=True)


def test_teachers_see_crops_of_their_own_size(
    pack: ModelPack, recognizer: Recognizer, detector: Detector, astronaut: NDArray[np.uint8]
) -> None:
    landmarks = detector.detect([astronaut])[0].landmarks_xy[:1]
    large = align(astronaut, landmarks, ALIGNMENT)
    taught = teacher_embeddings(pack.directory, as_set(large)).numpy()
    expected = with_mirror(lambda crops: recognizer.embed(realign_crops(crops, STANDARD_ALIGNMENT)), large)
    np.testing.assert_allclose(taught, expected, atol=1e-5)


def test_augmentation_scales_with_the_crop(rng: np.random.Generator) -> None:
    """An enlarged crop is changed as the crop is: masks and erased squares cover the same part of the face."""
    smooth = torch.from_numpy(rng.uniform(-1, 1, (1, 3, 7, 7)).astype(np.float32))
    small, large = (
        F.interpolate(smooth, (side, side), mode="bicubic", align_corners=False).clamp(-1, 1).expand(32, -1, -1, -1)
        for side in (112, 224)
    )
    for config in (
        AugmentConfig(flip=0, move=0, low_resolution=0, gray=0, brightness=0, contrast=0, erase=0, mask=1),
        AugmentConfig(flip=0, move=0, low_resolution=0, gray=0, brightness=0, contrast=0, erase=1),
        AugmentConfig(flip=0, move=1, low_resolution=1, gray=0, brightness=0, contrast=0, erase=0, rotation_deg=6),
    ):
        uniforms = draw_uniforms(32, 7, 1)
        changed = augment(small, uniforms, config)
        reduced = F.interpolate(augment(large, uniforms, config), (112, 112), mode="area")
        assert (changed - small).abs().mean() > 0.01
        assert (reduced - changed).abs().mean() < 0.05 * max(1.0, float((changed - small).abs().mean()))
