"""Every format that phones, scanners and browsers write, by files that its libraries wrote, compared pixel by pixel."""

from __future__ import annotations

import io
import os
import re
import signal
import struct
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pillow_heif
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from kith import Kith
from models.vision.photo_files import photo_format
from service.inference import decoder_processes
from service.inference.images import ImageLimits, PhotoDecoder
from tests.refusals import raises_code
from tests.service.inference.decoders import decode, open_photo
from tests.service.inference.image_files import QUICK, chunk, encode, heic, heic_claiming, heic_grid, packed_tiff
from tests.service.inference.test_images import exif_of, oriented, stored

Pixels = NDArray[np.uint8]
LIMITS = ImageLimits(5_000_000, 4_000_000)
EXACT: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}


@pytest.fixture(scope="module")
def scene() -> Pixels:
    """No two of its turns and reflections are alike; sides of even and odd length."""
    image = Image.new("RGB", (97, 60), (30, 60, 90))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 40, 20), (250, 10, 10))
    draw.rectangle((60, 40, 96, 59), (10, 250, 10))
    draw.ellipse((8, 32, 30, 54), (240, 240, 20))
    return np.asarray(image)


def apart(decoded: Pixels, expected: Pixels) -> float:
    """Mean difference of the levels; of other shapes, infinite."""
    if decoded.shape != expected.shape:
        return float("inf")
    return float(np.abs(decoded.astype(int) - expected).mean())


# Turned


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_every_format_that_has_one(orientation: int, kind: str, scene: Pixels) -> None:
    options: dict[str, Any] = {"quality": 98, "subsampling": 0} if kind in ("JPEG", "MPO") else EXACT.get(kind, {})
    photo = open_photo(oriented(scene, orientation, kind, **options), LIMITS)
    assert (photo.height, photo.width) == scene.shape[:2]
    assert apart(photo.decode().upright, scene) < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_heic_is_turned_once(orientation: int, scene: Pixels) -> None:
    """HEIF properties rotate the image; the EXIF orientation is not applied again."""
    payload = heic(Image.fromarray(stored(scene, orientation)), exif=exif_of(orientation).tobytes())
    assert (b"irot" in payload or b"imir" in payload) == (orientation > 1)
    assert apart(decode(payload, LIMITS), scene) < 2
    tag = payload.index(struct.pack(">HHI", 0x0112, 3, 1))
    assert payload[tag + 9] == orientation
    for said in (1, 3, 6):
        other = payload[: tag + 8] + struct.pack(">H", said) + payload[tag + 10 :]
        assert apart(decode(other, LIMITS), scene) < 2
    photo = open_photo(payload, LIMITS)
    assert (photo.height, photo.width) == scene.shape[:2]


# Colors


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        ("GIF", ("L", "LA", "P", "1", "RGBA")),
        ("BMP", ("L", "P", "1", "RGBA")),
        ("TIFF", ("L", "LA", "P", "1", "RGBA", "CMYK")),
        ("PNG", ("L", "LA", "P", "1", "RGBA")),
    ],
)
def test_every_mode_becomes_rgb(kind: str, modes: tuple[str, ...], scene: Pixels) -> None:
    for mode in modes:
        image = Image.fromarray(scene).convert(mode)
        assert apart(decode(encode(image, kind), LIMITS), np.asarray(image.convert("RGB"))) < 3, mode


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_heic_of_every_mode(mode: str, astronaut: Pixels) -> None:
    image = Image.fromarray(astronaut).convert(mode)
    if mode.endswith("A"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    white = Image.new("RGBA", image.size, "white")
    expected = np.asarray(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))
    assert apart(decode(heic(image), LIMITS), expected) < 1


def test_heic_subsampled_and_compressed_as_phones_do(astronaut: Pixels) -> None:
    assert apart(decode(heic(Image.fromarray(astronaut), quality=70, chroma=420), LIMITS), astronaut) < 4


@pytest.mark.parametrize("mode", ["RGB;16", "RGBA;16", "I;16"])
def test_heic_of_more_than_8_bits(mode: str, astronaut: Pixels) -> None:
    values = astronaut.astype(np.uint16) * 257
    opaque = np.full(values.shape[:2], 65535, np.uint16)
    sent = {"RGB;16": values, "RGBA;16": np.dstack([values, opaque]), "I;16": values[..., 0]}[mode]
    buffer = io.BytesIO()
    size = (astronaut.shape[1], astronaut.shape[0])
    pillow_heif.encode(
        mode, size, np.ascontiguousarray(sent).tobytes(), buffer, quality=-1, chroma=444, enc_params=QUICK
    )
    expected = np.repeat(astronaut[..., :1], 3, 2) if mode == "I;16" else astronaut
    assert apart(decode(buffer.getvalue(), LIMITS), expected) < 1.5


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bits_keep_their_high_byte(suffix: str, channels: int, astronaut: Pixels) -> None:
    """Encode as OpenCV does."""
    low = np.random.default_rng(0).integers(0, 256, astronaut.shape[:2] + (4,), np.uint16)
    high = np.dstack([astronaut, np.full(astronaut.shape[:2], 255, np.uint8)]).astype(np.uint16)
    values = high << 8 | np.where(high == 255, 255, low)
    bgr = {1: values[..., 0], 3: values[..., 2::-1], 4: values[..., [2, 1, 0, 3]]}[channels]
    done, file = cv2.imencode(suffix, np.ascontiguousarray(bgr))
    assert done
    expected = np.repeat(astronaut[..., :1], 3, 2) if channels == 1 else astronaut
    assert apart(decode(file.tobytes(), LIMITS), expected) < 0.6


@pytest.mark.parametrize("white_is_zero", [False, True])
@pytest.mark.parametrize(("bits", "order"), [(2, "<"), (4, ">"), (8, "<"), (12, "<"), (16, "<"), (16, ">")])
def test_gray_tiff_of_any_depth(bits: int, order: str, white_is_zero: bool, astronaut: Pixels) -> None:
    """Dark too: the declared depth decides, not the brightest pixel."""
    for gray in (astronaut[..., 0].astype(int), astronaut[..., 0].astype(int) // 17):
        values = gray >> 8 - bits if bits < 8 else gray << bits - 8
        payload = packed_tiff((1 << bits) - 1 - values if white_is_zero else values, bits, order, white_is_zero)
        if white_is_zero and (bits == 12 or (bits, order) == (16, ">")):
            with raises_code("image_format", match="TIFF"):
                decode(payload, LIMITS)
            continue
        shades = values * 255 // ((1 << bits) - 1)
        assert apart(decode(payload, LIMITS), np.repeat(shades[..., None], 3, 2).astype(np.uint8)) <= 1


@pytest.mark.parametrize("bits", [10, 12, 14])
def test_gray_tiff_of_fewer_bits_than_it_stores(bits: int, astronaut: Pixels) -> None:
    """The largest sample value declares them."""
    file = io.BytesIO()
    Image.fromarray(astronaut[..., 0].astype(np.uint16) << bits - 8).save(file, "TIFF", tiffinfo={281: (1 << bits) - 1})
    assert apart(decode(file.getvalue(), LIMITS), np.repeat(astronaut[..., :1], 3, 2)) <= 1
    as_number, as_text = (struct.pack("<HHI", 281, kind, 1) for kind in (3, 2))
    assert as_number in file.getvalue()
    assert decode(file.getvalue().replace(as_number, as_text), LIMITS).shape == astronaut.shape


def test_compressed_tiff_of_12_bits(astronaut: Pixels) -> None:
    """As OpenCV does not write it: deflated."""
    gray = astronaut[..., 0].astype(int)
    payload = packed_tiff(gray << 4, 12)
    at = payload.index(struct.pack("<HHI", 273, 4, 1)) + 8
    (start,) = struct.unpack_from("<I", payload, at)
    body = zlib.compress(payload[start:])
    head = payload[:start].replace(struct.pack("<HHIHH", 259, 3, 1, 1, 0), struct.pack("<HHIHH", 259, 3, 1, 8, 0))
    size = struct.pack("<HHI", 279, 4, 1)
    head = head[: head.index(size) + 8] + struct.pack("<I", len(body)) + head[head.index(size) + 12 :]
    assert apart(decode(head + body, LIMITS), np.repeat(astronaut[..., :1], 3, 2)) < 1


@pytest.mark.parametrize(("bits", "channels"), [(10, 1), (14, 1), (10, 3), (12, 3), (14, 3)])
def test_a_tiff_of_another_depth_is_refused_by_name(bits: int, channels: int, astronaut: Pixels) -> None:
    values = astronaut.astype(int) << bits - 8
    with raises_code("image_format", match="TIFF") as raised:
        decode(packed_tiff(values if channels == 3 else values[..., 0], bits), LIMITS)
    assert "16 bits" in raised.value.remedy


def test_gray_tiff_of_32_bits(astronaut: Pixels) -> None:
    expected = np.repeat(astronaut[..., :1], 3, 2)
    for bits in (8, 16, 24, 31):
        assert apart(decode(packed_tiff(astronaut[..., 0].astype(np.int64) << bits - 8, 32), LIMITS), expected) < 1


def test_floats_that_are_not_numbers_are_black() -> None:
    values = np.array([[0.5, np.nan, 1.0, np.inf, -np.inf, -2.0]], np.float32)
    assert decode(encode(Image.fromarray(values), "TIFF"), LIMITS)[0, :, 0].tolist() == [127, 0, 255, 0, 0, 0]


@pytest.mark.parametrize("depth", [10, 12])
@pytest.mark.parametrize("channels", [3, 4])
def test_avif_of_more_than_8_bits(depth: int, channels: int, astronaut: Pixels) -> None:
    opaque = np.full(astronaut.shape[:2], 255, np.uint8)
    bgra = np.dstack([astronaut[..., ::-1], opaque]).astype(np.uint16) * 257 >> 16 - depth
    options = [cv2.IMWRITE_AVIF_DEPTH, depth, cv2.IMWRITE_AVIF_QUALITY, 95, cv2.IMWRITE_AVIF_SPEED, 9]
    done, file = cv2.imencode(".avif", np.ascontiguousarray(bgra[..., :channels]), options)
    assert done
    assert apart(decode(file.tobytes(), LIMITS), astronaut) < 2


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_gray_png_of_any_depth(bits: int) -> None:
    """And with a chunk that says how many bits the camera had: samples are scaled to all bits anyway."""
    levels = np.linspace(0, 255, 64).astype(int) >> max(0, 8 - bits) << max(0, bits - 8)
    row = np.packbits((levels[:, None] >> np.arange(bits - 1, -1, -1) & 1).ravel()).tobytes()
    expected = levels * 255 // ((1 << bits) - 1)
    for extra in (b"", chunk(b"sBIT", bytes([min(bits, 12)]))):
        header = struct.pack(">IIBBBBB", 64, 1, bits, 0, 0, 0, 0)
        body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
        decoded = decode(b"\x89PNG\r\n\x1a\n" + body, LIMITS)
        assert np.abs(decoded[0, :, 0].astype(int) - expected).max() <= 1


def test_cmyk_jpegs_as_adobe_writes_them(astronaut: Pixels) -> None:
    """Inverted; and the same photo as YCCK, whose colors a decoder turns into CMYK first."""
    cmyk = encode(Image.fromarray(astronaut).convert("CMYK"), "JPEG", quality=98, subsampling=0)
    assert b"Adobe" in cmyk
    assert apart(decode(cmyk, LIMITS), astronaut) < 3
    luma = np.asarray(Image.fromarray(255 - astronaut).convert("YCbCr"))
    inverted = Image.fromarray(np.dstack([255 - luma, np.zeros_like(luma[..., :1])]), "CMYK")
    payload = encode(inverted, "JPEG", quality=98, subsampling=0)
    transform = payload.index(b"Adobe") + 11
    assert apart(decode(payload[:transform] + b"\x02" + payload[transform + 1 :], LIMITS), astronaut) < 3


def test_a_palette_with_a_color_that_is_none(scene: Pixels) -> None:
    image = Image.fromarray(scene).quantize(8)
    background = image.getpixel((50, 5))
    white = scene.copy()
    white[(scene == (30, 60, 90)).all(-1)] = 255
    for kind in ("PNG", "GIF"):
        assert apart(decode(encode(image, kind, transparency=background), LIMITS), white) < 3


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF"])
def test_what_shines_through_shines_on_white(kind: str, scene: Pixels) -> None:
    image = Image.fromarray(scene)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    white = Image.new("RGBA", image.size, "white")
    expected = np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    assert apart(decode(encode(image, kind, **EXACT.get(kind, {})), LIMITS), expected) < 1.5


def test_colors_beyond_srgb_are_taken_as_they_are(kith: Kith, astronaut: Pixels) -> None:
    """A phone's photo in Display P3, its profile left out of account, is of the same person as one in sRGB."""
    linear = np.where(astronaut <= 10, astronaut / 255 / 12.92, ((astronaut / 255 + 0.055) / 1.055) ** 2.4)
    # The primaries of sRGB in those of Display P3, both of white D65 (CSS Color 4, sample code).
    to_p3 = np.array([[0.8224620, 0.1775380, 0], [0.0331942, 0.9668058, 0], [0.0170826, 0.0723974, 0.9105199]])
    wide = linear @ to_p3.T
    encoded = np.where(wide <= 0.0031308, wide * 12.92, 1.055 * wide ** (1 / 2.4) - 0.055)
    phone = heic(Image.fromarray(np.rint(encoded.clip(0, 1) * 255).astype(np.uint8)), quality=90)
    vectors = [kith.embed(photo).images[0].faces[0].embedding for photo in (astronaut, phone)]
    assert vectors[0] is not None
    assert vectors[1] is not None
    assert float(np.dot(vectors[0], vectors[1])) > 0.97


# Several in one file


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF", "TIFF", "MPO"])
def test_the_first_of_several(kind: str, scene: Pixels) -> None:
    first, *others = [Image.fromarray(scene), Image.new("RGB", (97, 60), "blue"), Image.new("RGB", (97, 60), "red")]
    options: dict[str, Any] = {"quality": 98} if kind == "MPO" else EXACT.get(kind, {})
    payload = encode(first, kind, save_all=True, append_images=others, **options)
    assert apart(decode(payload, LIMITS), scene) < 6


def test_the_primary_of_a_heic(scene: Pixels) -> None:
    file = pillow_heif.HeifFile()
    for image in (Image.new("RGB", (640, 480), "blue"), Image.fromarray(scene), Image.new("RGB", (16, 16), "red")):
        file.add_from_pillow(image)
    buffer = io.BytesIO()
    file.save(buffer, quality=-1, chroma=444, primary_index=1, enc_params=QUICK)
    assert apart(decode(buffer.getvalue(), LIMITS), scene) < 2


def test_what_phones_hang_on_a_photo(scene: Pixels) -> None:
    """Motion photos: a video behind a JPEG, or in a box of its own behind a HEIC."""
    video = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + np.random.default_rng(0).bytes(200_000)
    still = heic(Image.fromarray(scene))
    assert apart(decode(still + struct.pack(">I", len(video) + 8) + b"mpvd" + video, LIMITS), scene) < 2
    photo = encode(Image.fromarray(scene), "JPEG", quality=98, subsampling=0)
    assert apart(decode(photo + video, LIMITS), scene) < 2


# Limits and error details


def test_a_grid_is_put_together(scene: Pixels) -> None:
    """Encode as phones do."""
    tile = Image.fromarray(scene[:40, :40]).resize((64, 64), Image.Resampling.NEAREST)
    decoded = decode(heic_grid(1, 2, 190, 128, heic(tile)), LIMITS)
    assert apart(decoded, np.tile(np.asarray(tile), (2, 3, 1))[:, :190]) < 2


@pytest.mark.parametrize("size", [(8, 8), (96, 60), (103, 70), (1999, 2000), (2001, 2000), (0x7FFFFFFF, 0x7FFFFFFF)])
def test_a_heic_that_lies_about_its_size(size: tuple[int, int], scene: Pixels) -> None:
    codes = ("image_damaged", "image_too_large") if min(size) >= 2000 else ("image_damaged",)
    with raises_code(*codes):
        decode(heic_claiming(*size, heic(Image.fromarray(scene))), LIMITS)


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_heic_that_ends_too_early(kept: float, astronaut: Pixels) -> None:
    whole = heic(Image.fromarray(astronaut))
    with raises_code("image_damaged"):
        decode(whole[: int(len(whole) * kept)], LIMITS)


def test_an_avif_is_no_heic_and_no_video_is_a_photo(scene: Pixels) -> None:
    assert photo_format(heic(Image.fromarray(scene))) == "HEIC"
    avif = encode(Image.fromarray(scene), "AVIF")
    assert photo_format(avif) == "AVIF"
    as_mif1 = avif[:8] + b"mif1" + avif[12:]
    assert photo_format(as_mif1) == "AVIF"
    assert apart(decode(as_mif1, LIMITS), scene) < 12
    with raises_code("image_format") as raised:
        decode(b"\0\0\0\x18ftypisom\0\0\0\0mp42isom" + bytes(100), LIMITS)
    assert "HEIC" in raised.value.remedy


def test_a_phones_photo_is_enrolled_and_identified(kith: Kith, gallery: str, astronaut: Pixels) -> None:
    """Held upright: stored on its side."""
    photo = heic(Image.fromarray(stored(astronaut, 6)), exif=exif_of(6).tobytes(), quality=80, chroma=420)
    kith.enroll(gallery, "eileen", photo)
    (found,) = kith.identify(gallery, encode(Image.fromarray(astronaut), "AVIF")).results
    assert (found.outcome, found.subject) == ("identified", "eileen")


# AVIF that declares another size than it has


def avif_claiming(width: int, height: int, payload: bytes) -> bytes:
    """Change the sizes in the boxes, of images and tracks, and not in the AV1 data."""
    for at in [found.end() + 4 for found in re.finditer(b"ispe", payload)]:
        payload = payload[:at] + struct.pack(">II", width, height) + payload[at + 8 :]
    for at in [found.end() + 24 for found in re.finditer(b"av01\0{6}", payload)]:
        payload = payload[:at] + struct.pack(">HH", width, height) + payload[at + 4 :]
    return payload


@pytest.mark.parametrize("save_all", [False, True])
def test_an_avif_that_lies_about_its_size_gets_the_memory_of_what_it_said(save_all: bool) -> None:
    image = Image.new("RGB", (7200, 7000))
    payload = encode(image, "AVIF", speed=10, save_all=save_all, append_images=[image] if save_all else [])
    with raises_code("image_damaged", "image_too_large"):
        decode(avif_claiming(100, 100, payload), LIMITS)


# Processes of decoders


def process_of(photos: PhotoDecoder) -> Path:
    """Return the folder of the only decoder in /proc."""
    (child,) = photos._processes._idle
    return Path("/proc", str(child._process.pid))


def test_a_decoder_that_ends_refuses_its_photo_and_the_next_one_starts_another(scene: Pixels) -> None:
    photo = encode(Image.fromarray(scene), "TIFF")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(photo)
        header, first = photos.read_header(photo), process_of(photos)
        os.kill(int(first.name), signal.SIGKILL)
        with raises_code("image_damaged", match="its decoder ended"):
            header.open()
        assert apart(photos.decode(photo), scene) == 0
        second = process_of(photos)
        assert second != first and not first.exists()
    assert not second.exists()


def test_a_decoder_that_takes_too_long_is_ended(scene: Pixels, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = encode(Image.fromarray(scene), "GIF")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(photo)
        header, stopped = photos.read_header(photo), process_of(photos)
        os.kill(int(stopped.name), signal.SIGSTOP)
        monkeypatch.setattr(decoder_processes, "TIMEOUT_S", 0.1)
        with raises_code("image_damaged", match="took too long"):
            header.open()
        assert not stopped.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_decoder_outlives_the_signals_that_end_a_server(number: signal.Signals, scene: Pixels) -> None:
    """The server answers its last requests first."""
    photo = encode(Image.fromarray(scene), "TIFF")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(photo)
        header, process = photos.read_header(photo), process_of(photos)
        os.kill(int(process.name), number)
        header.open()
        assert process_of(photos) == process


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the environment of a protected process")
def test_a_decoder_has_neither_files_nor_secrets_nor_core_dumps(scene: Pixels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_MASTER_KEY", "secret")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(heic(Image.fromarray(scene)))
        process = process_of(photos)
        limits = (process / "limits").read_text()
        assert re.search(r"Max open files +0 +0 ", limits) and re.search(r"Max core file size +0 +0 ", limits)
        assert b"KITH_MASTER_KEY" not in (process / "environ").read_bytes()
