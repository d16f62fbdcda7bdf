"""Augmentations have their stated effect only, independent of the slice, and are reproducible."""

from __future__ import annotations

from dataclasses import fields, replace

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from models.vision.alignment import TEMPLATE_XY
from training.config import AugmentConfig
from training.data.augment import ERASED_SIDE_PX, Draw, augment, draw_uniforms

OFF = AugmentConfig(**{field.name: 0 for field in fields(AugmentConfig)})
ALL = AugmentConfig(0.5, 0.5, 0.05, 0.1, 15.0, 0.5, 0.3, 0.3, 0.3, 0.5, 0.5)


@pytest.fixture
def crops(rng: np.random.Generator) -> Tensor:
    """Return noise with strong detail, over the whole range."""
    return torch.from_numpy(rng.uniform(-1, 1, (24, 3, 112, 112)).astype(np.float32))


def uniforms(count: int, **columns: float) -> Tensor:
    """Return uniforms of 0.5, with some columns set."""
    u = torch.full((count, len(Draw)), 0.5)
    for name, value in columns.items():
        u[:, Draw[name]] = value
    return u


def test_uniforms_depend_only_on_seed_and_step() -> None:
    u = draw_uniforms(64, 7, 3)
    assert u.shape == (64, len(Draw))
    assert u.dtype == torch.float32
    assert ((u >= 0) & (u < 1)).all()
    assert torch.equal(u, draw_uniforms(64, 7, 3))
    others = [draw_uniforms(64, 7, 4), draw_uniforms(64, 8, 3), draw_uniforms(64, 7 + 2**32, 3)]
    assert all(not torch.equal(u, other) for other in others)


def test_a_slice_is_augmented_as_in_its_batch(crops: Tensor) -> None:
    before, u = crops.clone(), draw_uniforms(len(crops), 1, 2)
    whole = augment(crops, u, ALL)
    for a, b in ((0, 24), (0, 12), (12, 24), (5, 6), (17, 24)):
        assert torch.equal(augment(crops[a:b], u[a:b], ALL), whole[a:b])
    assert torch.equal(crops, before)


def test_zero_probabilities_change_nothing(crops: Tensor) -> None:
    assert torch.equal(augment(crops, draw_uniforms(len(crops), 1, 1), OFF), crops)


@pytest.mark.parametrize("kind", ["flip", "move", "low_resolution", "gray", "erase", "mask"])
def test_a_probability_is_a_share_of_images(kind: str) -> None:
    small = torch.linspace(-0.9, 0.9, 112).expand(400, 3, 112, 112) * torch.tensor([1, 0.5, 0.25])[:, None, None]
    config = replace(OFF, shift=0.1, **{kind: 0.3})
    changed = (augment(small, draw_uniforms(400, 1, 1), config) != small).flatten(1).any(1)
    assert 90 <= int(changed.sum()) <= 150


def test_flip_and_gray(crops: Tensor) -> None:
    assert torch.equal(augment(crops, uniforms(24), replace(OFF, flip=1.0)), crops.flip(3))
    out = augment(crops, uniforms(24), replace(OFF, gray=1.0))
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert out.std() > 0.1


def test_a_shift_of_whole_pixels_moves_them(crops: Tensor) -> None:
    config = replace(OFF, move=1.0, shift=7 / 112)
    right = augment(crops, uniforms(24, SHIFT_X=0.0), config)
    assert torch.allclose(right[..., 7:], crops[..., :-7], atol=1e-4)
    down = augment(crops, uniforms(24, SHIFT_Y=0.0), config)
    assert torch.allclose(down[..., 7:, :], crops[..., :-7, :], atol=1e-4)


def test_zoom_and_rotation_agree_with_opencv(rng: np.random.Generator) -> None:
    smooth = cv2.GaussianBlur(rng.uniform(-1, 1, (112, 112, 3)), (0, 0), 4).astype(np.float32)
    smooth /= np.abs(smooth).max()
    u = uniforms(1, ROTATION=0.75, ZOOM=0.0)  # 20 degrees; 0.9 of the width fills the crop
    out = augment(torch.from_numpy(smooth).permute(2, 0, 1)[None], u, replace(OFF, move=1.0, rotation_deg=40, zoom=0.1))
    matrix = cv2.getRotationMatrix2D((55.5, 55.5), -20, 0.9)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    expected = cv2.warpAffine(smooth, matrix, (112, 112), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    assert np.abs(out[0].permute(1, 2, 0).numpy() - expected).max() < 0.02
    assert np.abs(smooth - expected).max() > 0.5


def test_brightness_and_contrast(crops: Tensor) -> None:
    brighter = augment(crops, uniforms(24, BRIGHTNESS=0.75), replace(OFF, brightness=0.2))
    assert torch.allclose(brighter, (crops + 0.1).clamp(-1, 1), atol=1e-6)
    flatter = augment(crops, uniforms(24, CONTRAST=0.0), replace(OFF, contrast=0.25))
    assert torch.allclose(flatter, crops * 0.75, atol=1e-6)


def test_low_resolution_has_three_sides(crops: Tensor) -> None:
    config = replace(OFF, low_resolution=1.0)
    detail = [augment(crops, uniforms(24, SIDE=u), config).diff(dim=3).abs().mean() for u in (0.0, 0.5, 0.99)]
    assert 0 < detail[0] < detail[1] < detail[2] < 0.5 * crops.diff(dim=3).abs().mean()
    flat = torch.full((1, 3, 112, 112), 0.3)
    assert torch.allclose(augment(flat, uniforms(1), config), flat)


def test_erasing_fills_one_rectangle_with_one_color() -> None:
    crops = torch.ones(300, 3, 112, 112)  # a color that is never drawn: uniforms stay below 1
    out = augment(crops, draw_uniforms(300, 3, 3), replace(OFF, erase=1.0))
    tops, shapes = set(), set()
    for image in out:
        ys, xs = (image[0] < 1).nonzero().unbind(1)
        height, width = int(ys.max() - ys.min() + 1), int(xs.max() - xs.min() + 1)
        assert len(ys) == height * width
        assert all(ERASED_SIDE_PX[0] <= side < ERASED_SIDE_PX[1] for side in (height, width))
        assert (image[:, ys, xs] == image[:, ys[:1], xs[:1]]).all()
        tops.add(int(ys.min()))
        shapes.add((height, width))
    assert len(tops) > 50
    assert len(shapes) > 100  # the sides are drawn apart


def test_a_mask_covers_the_mouth_and_never_the_eyes(crops: Tensor) -> None:
    batch = crops[:1].expand(500, -1, -1, -1)
    changed = (augment(batch, draw_uniforms(500, 4, 4), replace(OFF, mask=1.0)) != batch).any(1)
    left_eye, right_eye, _, *mouth = TEMPLATE_XY.round().astype(int)
    assert not changed[:, : max(left_eye[1], right_eye[1]) + 6].any()
    for x, y in mouth:
        assert changed[:, y, x].all()
    assert changed[:, 100, 56].all()  # the chin
    assert not changed[:, 60, [0, 111]].any()  # the ears
    assert len({int(c.sum()) for c in changed}) > 100


def test_a_mask_is_cloth_of_one_color_darker_at_the_cheeks() -> None:
    crops = torch.zeros(1, 3, 112, 112)
    config = replace(OFF, mask=1.0)
    out = augment(crops, uniforms(1, MASK_RED=0.8, MASK_GREEN=0.4, MASK_BLUE=0.2), config)[0]
    middle, cheek = (out[:, 85, 56] + 1) / 2, (out[:, 85, 86] + 1) / 2
    assert torch.allclose(middle, torch.tensor([0.8, 0.4, 0.2]), atol=1e-3)
    assert torch.allclose(cheek / cheek[0], middle / middle[0], atol=1e-3)
    assert 0.5 < float(cheek[0] / middle[0]) < 0.95
