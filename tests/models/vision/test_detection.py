"""Decoding and suppression match plain loops, and photos give the faces they show."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from models.errors import PackError
from models.pack.loading import load_pack
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import (
    Detector,
    SCRFDHead,
    YuNetHead,
    box_areas,
    choose_canvas,
    largest_box,
    suppress_overlaps,
)
from models.vision.pixels import to_planes
from models.vision.specs import ColorOrder, Normalization


def greedy(boxes: NDArray[np.float32], scores: NDArray[np.float32], limit: float) -> list[int]:
    """Suppress overlapping boxes with the textbook loop."""
    kept: list[int] = []
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        for j in kept:
            w = min(boxes[i][2], boxes[j][2]) - max(boxes[i][0], boxes[j][0])
            h = min(boxes[i][3], boxes[j][3]) - max(boxes[i][1], boxes[j][1])
            shared = max(0.0, float(w)) * max(0.0, float(h))
            union = sum(float((b[2] - b[0]) * (b[3] - b[1])) for b in (boxes[i], boxes[j])) - shared
            if shared > limit * union:
                break
        else:
            kept.append(i)
    return kept


@given(st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_suppression_equals_the_textbook_loop(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner = rng.integers(0, 50, (count, 2))
    boxes = np.concatenate([corner, corner + rng.integers(1, 40, (count, 2))], 1).astype(np.float32)
    scores = rng.integers(0, 10, count).astype(np.float32)
    assert suppress_overlaps(boxes, scores).tolist() == greedy(boxes, scores, 0.4)


def test_scrfd_decoding_equals_a_plain_loop(rng: np.random.Generator) -> None:
    height, width = 64, 96
    counts = [height // s * width // s * 2 for s in (8, 16, 32)]
    outputs = [rng.random((2, n, k)).astype(np.float32) for k in (1, 4, 10) for n in counts]
    min_score = 0.4
    found = SCRFDHead(9).decode([output[1] for output in outputs], width, min_score)
    row = 0
    for level, stride in enumerate((8, 16, 32)):
        n = 0
        for y in range(height // stride):
            for x in range(width // stride):
                for _ in range(2):
                    if outputs[level][1, n, 0] >= min_score:
                        left, top, right, bottom = outputs[level + 3][1, n] * stride
                        box = [x * stride - left, y * stride - top, x * stride + right, y * stride + bottom]
                        assert np.allclose(found.boxes[row], box, atol=1e-4)
                        points = outputs[level + 6][1, n].reshape(5, 2) * stride + [x * stride, y * stride]
                        assert np.allclose(found.landmarks[row], points, atol=1e-4)
                        assert found.scores[row] == outputs[level][1, n, 0]
                        row += 1
                    n += 1
    assert len(found.scores) == row > 0


def test_the_best_score_is_that_of_the_best_anchor(rng: np.random.Generator) -> None:
    outputs = [rng.random((2 * 4**level, k)).astype(np.float32) for k in (1, 4, 10) for level in (3, 2, 1)]
    assert SCRFDHead(9).best_score(outputs) == SCRFDHead(9).decode(outputs, 64, 0.01).scores.max()
    names = [f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in (8, 16, 32)]
    outputs = [rng.random((4**level, k)).astype(np.float32) for k in (1, 1, 4, 10) for level in (3, 2, 1)]
    yunet = YuNetHead(names)
    assert yunet.best_score(outputs) == yunet.decode(outputs, 64, 0.01).scores.max()
    with pytest.raises(PackError, match="YuNet"):
        YuNetHead(["a"] * 12)


@given(st.integers(1, 640), st.integers(1, 640), st.integers(0, 2**32 - 1))
def test_a_rotated_canvas_is_that_of_the_rotated_photo(detector: Detector, height: int, width: int, seed: int) -> None:
    photo = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    for turns in (1, 2, 3):
        rotated = detector.rotated(detector.prepare(photo), turns)
        expected = detector.prepare(np.rot90(photo, turns).copy())
        assert (rotated.planes == expected.planes).all()
        sizes = (expected.canvas, expected.photo_height_px, expected.photo_width_px)
        assert (rotated.canvas, rotated.photo_height_px, rotated.photo_width_px) == sizes
        assert rotated.turns == turns


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_canvas_holds_the_photo(height: int, width: int) -> None:
    canvas = choose_canvas(height, width)
    assert round(height * canvas.scale) <= canvas.height_px
    assert round(width * canvas.scale) <= canvas.width_px
    assert canvas.scale <= 1
    assert canvas.height_px % 32 == canvas.width_px % 32 == 0


def yunet_detector(reference: Path) -> Detector:
    spec = replace(
        load_pack(reference).detection,
        path=reference / "detector_yunet.onnx",
        head="yunet",
        normalization=Normalization(0.0, 1.0, "BGR"),
    )
    return Detector(OnnxNetwork(spec.path), spec)


def test_a_mixed_batch_matches_single_photos(
    detector: Detector, astronaut: NDArray[np.uint8], group: NDArray[np.uint8], nobody: NDArray[np.uint8]
) -> None:
    photos = [group, astronaut, nobody, astronaut[::2, ::2], group[:, ::-1]]
    together = detector.detect(photos)
    assert [len(faces) for faces in together[:3]] == [6, 1, 0]
    for photo, faces in zip(photos, together, strict=True):
        (alone,) = detector.detect([photo])
        assert np.allclose(faces.boxes_xyxy, alone.boxes_xyxy, atol=0.1)
        assert np.allclose(faces.scores, alone.scores, atol=1e-3)


def test_boxes_with_swapped_sides_have_no_area() -> None:
    swapped = np.array([[90, 90, 10, 10], [10, 10, 30, 30], [90, 0, 10, 90]], np.float32)
    assert box_areas(swapped).tolist() == [0, 400, 0]
    assert largest_box(swapped) == 1


def test_yunet_matches_its_reference_on_lfw(reference: Path, data: Path) -> None:
    yunet = yunet_detector(reference)
    with (data / "lfw" / "landmarks_yunet.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))[::1500]
    for row in rows:
        with Image.open(data / "lfw" / "images" / row["file"]) as image:
            photo = np.asarray(image.convert("RGB"))
        (faces,) = yunet.detect([photo])
        at = faces.nearest(125, 125)
        expected = [[float(row[f"lx{i}"]), float(row[f"ly{i}"])] for i in range(1, 6)]
        assert np.abs(faces.landmarks_xy[at] - expected).max() < 1.5


@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_planes_hold_normalized_pixels_and_keep_the_rest(color: ColorOrder, rng: np.random.Generator) -> None:
    images = [rng.integers(0, 256, (height, 7, 3), dtype=np.uint8) for height in (5, 8)]
    images.append(rng.integers(0, 256, (16, 14, 3), dtype=np.uint8)[::2, ::2])  # strided view
    out = to_planes(images, Normalization(127.5, 128.0, color), np.full((3, 3, 9, 8), 7, np.float32))
    for image, planes in zip(images, out, strict=True):
        wanted = (image[..., :: 1 if color == "RGB" else -1].astype(np.float64) - 127.5) / 128
        np.testing.assert_allclose(planes[:, : image.shape[0], :7].transpose(1, 2, 0), wanted, rtol=1e-6)
        assert (planes[:, image.shape[0] :] == 7).all()
        assert (planes[:, :, 7:] == 7).all()
