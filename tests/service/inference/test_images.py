"""JPEGs are decoded as Pillow decodes them, at any scale and orientation."""

from __future__ import annotations

import io
import re
import struct

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from service.core.errors import ImageError
from service.inference.images import SHORT_BYTES, ImageLimits, has_short_header
from tests.conftest import jpeg
from tests.refusals import raises_code
from tests.service.inference.image_files import (
    FORMATS,
    decode,
    encode,
    exif_of,
    oriented,
    read_header,
    stored,
)

LIMITS = ImageLimits(max_bytes=5_000_000, max_pixels=4_000_000)


def by_pillow(payload: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(payload), formats=FORMATS) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


JPEG_KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "baseline": ("RGB", {}),
    "4:2:2": ("RGB", {"subsampling": 1}),
    "4:4:4": ("RGB", {"subsampling": 0}),
    "quality 30": ("RGB", {"quality": 30}),
    "progressive": ("RGB", {"progressive": True}),
    "restart markers": ("RGB", {"restart_marker_blocks": 5}),
    "gray": ("L", {}),
    "CMYK": ("CMYK", {}),
    "CMYK, progressive": ("CMYK", {"progressive": True}),
}


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_has_the_pixels_that_pillow_gives_it_if_it_is_whole(
    orientation: int, kind: str, astronaut: NDArray[np.uint8]
) -> None:
    mode, options = JPEG_KINDS[kind]
    image = Image.fromarray(stored(astronaut[:333, :251], orientation)).convert(mode)
    payload = encode(image, "JPEG", exif=exif_of(orientation), **options)
    header = read_header(payload, LIMITS)
    whole, small = header.decode(), header.decode(0.1)
    assert (whole.height, whole.width) == (small.height, small.width) == (333, 251)
    assert (whole.pixels == by_pillow(payload)).all()
    assert small.reduction == (1.0 if mode == "CMYK" else 0.125)
    # Only the end marker may be missing.
    for ended in (payload[:-1], payload[:-2], payload[:-2] + bytes(16)) if "progressive" not in kind else ():
        assert (decode(ended, LIMITS) == decode(payload, LIMITS)).all()
        assert read_header(ended, LIMITS).decode(0.2).pixels.shape[2] == 3
    # The last byte of a scan may be padding.
    for missing in (2, 5) if "progressive" in kind else (5, 6, 10, 100, len(payload) // 2):
        for scale in (1.0, 0.2):
            with raises_code("image_damaged"):
                read_header(payload[:-missing], LIMITS).decode(scale)


@given(
    st.integers(1, 8),
    st.integers(600, 620),
    st.integers(300, 320),
    st.sampled_from([1.0, 0.5, 0.3, 0.25, 0.1]),
    st.integers(0, 2**32 - 1),
)
def test_points_lie_where_the_photo_shows_them(
    orientation: int, height: int, width: int, scale: float, seed: int
) -> None:
    """In a photo whose colors tell where one is."""
    y, x = np.mgrid[:height, :width]
    upright = np.rint(np.stack([x * 0.35, y * 0.35, x * 0.2 + y * 0.2], -1)).astype(np.uint8)
    picture = read_header(oriented(upright, orientation, quality=98, subsampling=0), LIMITS).decode(scale)
    assert picture.reduction >= scale
    assert picture.pixels.shape[0] * picture.pixels.shape[1] < 1.05 * picture.reduction**2 * height * width
    points = np.random.default_rng(seed).uniform(20, 280, (50, 2)).astype(np.float32)
    expected = points @ np.array([[0.35, 0, 0.2], [0, 0.35, 0.2]], np.float32)
    small = 0.4 * picture.reduction
    for image, at, tolerance in (
        (picture.pixels, picture.points(points), 3.0),
        # To a pixel of the canvas.
        (picture.shrunk(small), (points + 0.5) * small - 0.5, 2 + 0.35 / small),
    ):
        across, down = at.astype(np.float32)[None].transpose(2, 0, 1)
        seen = cv2.remap(np.ascontiguousarray(image), across, down, cv2.INTER_LINEAR)[0]
        assert np.abs(seen - expected).max() < tolerance
        assert np.abs((seen - expected).mean(0)).max() < tolerance / 2


def test_what_lies_beside_and_behind_a_photo_are_no_scans(astronaut: NDArray[np.uint8]) -> None:
    """EXIF segments as phones write them: makers' notes, previews, videos."""
    photo = jpeg(astronaut)
    scan = b"\xff\xda"
    segment = b"\xff\xe2" + struct.pack(">H", 60_002) + scan * 30_000
    several = encode(Image.fromarray(astronaut), "MPO", save_all=True, append_images=[Image.fromarray(astronaut)] * 50)
    random = np.random.default_rng(0).bytes(4_000_000)
    assert random.count(scan) > 20, "would be a scan each"
    limits = ImageLimits(5_000_000, astronaut.shape[0] * astronaut.shape[1])
    for beside in (photo + random, photo + scan * 1_000_000, photo[:2] + segment * 4 + photo[2:]):
        assert np.array_equal(decode(beside, limits), decode(photo, limits))
    assert decode(several, limits).shape == astronaut.shape


def test_only_a_small_jpeg_of_few_scans_is_short(astronaut: NDArray[np.uint8]) -> None:
    small = Image.fromarray(astronaut).resize((250, 250))

    def is_short(image: Image.Image, kind: str = "JPEG", **options: object) -> bool:
        payload = encode(image, kind, **options)
        return has_short_header(payload) and read_header(payload, LIMITS).is_short

    assert is_short(small)
    assert not is_short(small, progressive=True)
    assert not is_short(Image.fromarray(astronaut))
    assert not is_short(small, "PNG")
    assert not has_short_header(jpeg(small) + bytes(SHORT_BYTES))


def test_a_lack_of_memory_is_not_the_photos_fault(
    monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(simplejpeg, "decode_jpeg", full)
    with pytest.raises(MemoryError):
        decode(jpeg(astronaut), LIMITS)


def test_what_is_large_enough_is_not_decoded_again(astronaut: NDArray[np.uint8]) -> None:
    half = read_header(jpeg(astronaut), LIMITS).decode(0.4)
    assert half.reduction == 0.5
    assert half.at_least(0.5) is half
    assert half.at_least(7.0).reduction == 1.0
    whole = read_header(encode(Image.fromarray(astronaut), "PNG"), LIMITS).decode(0.4)
    assert whole.reduction == 1.0
    assert whole.at_least(7.0) is whole


def test_a_progressive_jpeg_that_ends_between_scans_is_truncated(astronaut: NDArray[np.uint8]) -> None:
    """Its scans are whole, and show the photo in fewer levels or colors."""
    whole = encode(Image.fromarray(astronaut), "JPEG", progressive=True)
    starts = [found.start() for found in re.finditer(rb"\xff\xda", whole)]
    assert len(starts) > 4
    for start in starts[1:]:
        with raises_code("image_damaged"):
            decode(whole[: whole.rindex(b"\xff\xc4", 0, start)], LIMITS)


@settings(max_examples=300)
@given(st.binary(max_size=30), st.integers(0, 1500), st.booleans(), st.sampled_from([1.0, 0.5]))
def test_a_damaged_jpeg_is_judged_as_pillow_judges_it(noise: bytes, position: int, cut: bool, scale: float) -> None:
    whole = encode(Image.effect_noise((40, 32), 50).convert("RGB"), "JPEG", exif=exif_of(6))
    damaged = whole[:position] + noise + (b"" if cut else whole[position + len(noise) :])
    try:
        expected = by_pillow(damaged)
    except UnidentifiedImageError:
        with raises_code("image_format", "image_empty"):
            read_header(damaged, LIMITS).decode(scale)
    except Exception:
        try:
            picture = read_header(damaged, LIMITS).decode(scale)
        except ImageError as refusal:
            assert refusal.code in ("image_damaged", "image_too_large")
            return
        # Pillow requires the end-of-image marker.
        assert not damaged.endswith(b"\xff\xd9")
        if scale == 1.0:
            assert (picture.pixels == by_pillow(damaged + b"\xff\xd9")).all()
    else:
        if expected.shape[0] * expected.shape[1] <= LIMITS.max_pixels:
            picture = read_header(damaged, LIMITS).decode(scale)
            assert (picture.height, picture.width) == expected.shape[:2]
            if scale == 1.0:
                assert (picture.pixels == expected).all()
