"""Every format that phones, scanners and browsers write, by files that its libraries wrote, compared pixel by pixel."""

from __future__ import annotations

import io
import os
import re
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pillow_heif
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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


# Pixels: each family of files by a function of a photo, which yields what is encoded, what is expected, and how near.


Sample = tuple[str, bytes, Pixels, float]


def grays(photo: Pixels) -> Pixels:
    """Return the red channel three times."""
    return np.repeat(photo[..., :1], 3, 2)


def on_white(image: Image.Image) -> Pixels:
    white = Image.new("RGBA", image.size, "white")
    return np.asarray(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))


def fading(photo: Pixels, mode: str = "RGB") -> Image.Image:
    image = Image.fromarray(photo).convert(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def written_by_opencv(suffix: str, bgr: NDArray[Any], *options: int) -> bytes:
    done, file = cv2.imencode(suffix, np.ascontiguousarray(bgr, np.uint16), options)
    assert done
    return file.tobytes()


def modes_of_pillow(photo: Pixels) -> Iterator[Sample]:
    modes = {"GIF": "L LA P 1 RGBA", "BMP": "L P 1 RGBA", "PNG": "L LA P 1 RGBA", "TIFF": "L LA P 1 RGBA CMYK"}
    for kind, names in modes.items():
        for mode in names.split():
            image = Image.fromarray(photo).convert(mode)
            yield f"{kind} {mode}", encode(image, kind), np.asarray(image.convert("RGB")), 5


def transparency(photo: Pixels) -> Iterator[Sample]:
    for kind in ("PNG", "WEBP", "TIFF", "AVIF"):
        image = fading(photo)
        yield kind, encode(image, kind, **EXACT.get(kind, {})), on_white(image), 1.5
    for mode in ("RGB", "L"):
        yield f"HEIC {mode}", heic(fading(photo, mode)), on_white(fading(photo, mode)), 1
    image = Image.fromarray(photo).quantize(8)
    first, colors = image.getpixel((0, 0)), np.asarray(image.convert("RGB")).copy()
    colors[np.asarray(image) == first] = 255
    for kind in ("PNG", "GIF"):
        yield f"{kind}, a color of its palette", encode(image, kind, transparency=first), colors, 3


def heics(photo: Pixels) -> Iterator[Sample]:
    image = Image.fromarray(photo)
    yield "as phones do", heic(image, quality=70, chroma=420), photo, 4
    yield "gray", heic(image.convert("L")), np.asarray(image.convert("L").convert("RGB")), 1
    deep = photo.astype(np.uint16) * 257
    opaque = np.full(deep.shape[:2], 65535, np.uint16)
    for mode, sent in {"RGB;16": deep, "RGBA;16": np.dstack([deep, opaque]), "I;16": deep[..., 0]}.items():
        buffer, pixels = io.BytesIO(), np.ascontiguousarray(sent).tobytes()
        pillow_heif.encode(mode, image.size, pixels, buffer, quality=-1, chroma=444, enc_params=QUICK)
        yield mode, buffer.getvalue(), grays(photo) if mode == "I;16" else photo, 1.5
    tile = Image.fromarray(photo[:64, :64])
    yield "a grid", heic_grid(1, 2, 190, 128, heic(tile)), np.tile(np.asarray(tile), (2, 3, 1))[:, :190], 2
    several = pillow_heif.HeifFile()
    for one in (Image.new("RGB", (640, 480), "blue"), image, Image.new("RGB", (16, 16), "red")):
        several.add_from_pillow(one)
    buffer = io.BytesIO()
    several.save(buffer, quality=-1, chroma=444, primary_index=1, enc_params=QUICK)
    yield "the primary of several", buffer.getvalue(), photo, 2


def more_than_8_bits(photo: Pixels) -> Iterator[Sample]:
    """The high byte is kept. Encoded as OpenCV does."""
    low = np.random.default_rng(0).integers(0, 256, (*photo.shape[:2], 4), np.uint16)
    high = np.dstack([photo, np.full(photo.shape[:2], 255, np.uint8)]).astype(np.uint16)
    values = high << 8 | np.where(high == 255, 255, low)
    for suffix in (".png", ".tiff"):
        for bgr in (values[..., 0], values[..., 2::-1], values[..., [2, 1, 0, 3]]):
            expected = grays(photo) if bgr.ndim == 2 else photo
            yield f"{suffix} {bgr.shape[2:]}", written_by_opencv(suffix, bgr), expected, 0.6
    for depth in (10, 12):
        options = [cv2.IMWRITE_AVIF_DEPTH, depth, cv2.IMWRITE_AVIF_QUALITY, 95, cv2.IMWRITE_AVIF_SPEED, 9]
        for channels in (3, 4):
            bgra = (high[..., [2, 1, 0, 3]] * 257 >> 16 - depth)[..., :channels]
            yield f".avif {depth} {channels}", written_by_opencv(".avif", bgra, *options), photo, 2.5


def gray_tiffs(photo: Pixels) -> Iterator[Sample]:
    """The brightest pixel of a file of more than 8 bits decides, so that values may fill fewer bits than it stores."""
    gray = photo[..., 0].astype(np.int64)
    for bits, order in ((2, "<"), (4, ">"), (8, "<"), (12, "<"), (16, "<"), (16, ">")):
        values, white = gray >> 8 - bits if bits < 8 else gray << bits - 8, (1 << bits) - 1
        shades = np.repeat((values * 255 // white)[..., None], 3, 2).astype(np.uint8)
        yield f"{bits}{order}", packed_tiff(values, bits, order), shades, 1.1
        if bits <= 8:
            yield f"{bits}{order} inverted", packed_tiff(white - values, bits, order, white_is_zero=True), shades, 1.1
    for bits in (8, 16, 24, 31):
        yield f"{bits} of 32", packed_tiff(gray << bits - 8, 32), grays(photo), 1
    for bits in (8, 10, 12, 14):
        image = Image.fromarray(photo[..., 0].astype(np.uint16) << bits - 8)
        yield f"{bits} of 16", encode(image, "TIFF"), grays(photo), 1


def gray_pngs(_: Pixels) -> Iterator[Sample]:
    """And with a chunk that says how many bits the camera had: samples are scaled to all bits anyway."""
    for bits in (1, 2, 4, 8, 16):
        levels = np.linspace(0, 255, 64).astype(int) >> max(0, 8 - bits) << max(0, bits - 8)
        row = np.packbits((levels[:, None] >> np.arange(bits - 1, -1, -1) & 1).ravel()).tobytes()
        expected = np.repeat((levels * 255 // ((1 << bits) - 1))[None, :, None], 3, 2).astype(np.uint8)
        for extra in (b"", chunk(b"sBIT", bytes([min(bits, 12)]))):
            header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 1, bits, 0, 0, 0, 0)) + extra
            body = chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
            yield f"{bits}", b"\x89PNG\r\n\x1a\n" + header + body, expected, 1


def cmyk_jpegs(photo: Pixels) -> Iterator[Sample]:
    """As Adobe writes them: inverted; and the same photo as YCCK, whose colors a decoder turns into CMYK first."""
    cmyk = encode(Image.fromarray(photo).convert("CMYK"), "JPEG", quality=98, subsampling=0)
    assert b"Adobe" in cmyk
    yield "CMYK", cmyk, photo, 3
    luma = np.asarray(Image.fromarray(255 - photo).convert("YCbCr"))
    inverted = Image.fromarray(np.dstack([255 - luma, np.zeros_like(luma[..., :1])]), "CMYK")
    payload = encode(inverted, "JPEG", quality=98, subsampling=0)
    transform = payload.index(b"Adobe") + 11
    yield "YCCK", payload[:transform] + b"\x02" + payload[transform + 1 :], photo, 3


def first_of_several(photo: Pixels) -> Iterator[Sample]:
    """Frames, pages, and motion photos: a video behind a JPEG, or in a box of its own behind a HEIC."""
    first, blank = Image.fromarray(photo), Image.new("RGB", photo.shape[1::-1], "blue")
    for kind in ("GIF", "PNG", "WEBP", "AVIF", "TIFF", "MPO"):
        options: dict[str, Any] = {"quality": 98} if kind == "MPO" else EXACT.get(kind, {})
        yield kind, encode(first, kind, save_all=True, append_images=[blank, blank], **options), photo, 10
    video = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + np.random.default_rng(0).bytes(200_000)
    yield "HEIC", heic(first) + struct.pack(">I", len(video) + 8) + b"mpvd" + video, photo, 2
    yield "JPEG", encode(first, "JPEG", quality=98, subsampling=0) + video, photo, 2


FAMILIES = (
    modes_of_pillow,
    transparency,
    heics,
    more_than_8_bits,
    gray_tiffs,
    gray_pngs,
    cmyk_jpegs,
    first_of_several,
)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_pixels_are_those_that_were_encoded(family: Callable[[Pixels], Iterator[Sample]], astronaut: Pixels) -> None:
    for name, payload, expected, tolerance in family(np.ascontiguousarray(astronaut[::2, ::2])):
        assert apart(decode(payload, LIMITS), expected) < tolerance, name


@pytest.mark.parametrize("bits", [10, 12, 14])
def test_a_tiff_of_another_depth_is_refused_by_name(bits: int, astronaut: Pixels) -> None:
    values = astronaut.astype(int) << bits - 8
    payloads = [packed_tiff(values, bits)] + ([packed_tiff(values[..., 0], bits)] if bits != 12 else [])
    for payload in (*payloads, packed_tiff(65535 - values[..., 0], 16, ">", True)):
        with raises_code("image_format", match="TIFF") as raised:
            decode(payload, LIMITS)
        assert "16 bits" in raised.value.remedy


# Limits and error details


def test_a_photo_that_lies_about_its_size_or_ends_too_early_is_refused(scene: Pixels) -> None:
    whole = heic(Image.fromarray(scene))
    for size in ((8, 8), (96, 60), (103, 70), (1999, 2000), (2001, 2000), (0x7FFFFFFF, 0x7FFFFFFF)):
        codes = ("image_damaged", "image_too_large") if min(size) >= 2000 else ("image_damaged",)
        with raises_code(*codes):
            decode(heic_claiming(*size, whole), LIMITS)
    for kept in (0.3, 0.9):
        with raises_code("image_damaged"):
            decode(whole[: int(len(whole) * kept)], LIMITS)
    # The sizes in the boxes of an AVIF are changed, and not those in its data: it gets the memory of what it said.
    payload = encode(Image.new("RGB", (7200, 7000)), "AVIF", speed=10)
    for at in [found.end() + 4 for found in re.finditer(b"ispe", payload)]:
        payload = payload[:at] + struct.pack(">II", 100, 100) + payload[at + 8 :]
    with raises_code("image_damaged", "image_too_large"):
        decode(payload, LIMITS)


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


# Processes of decoders


def process_of(photos: PhotoDecoder) -> Path:
    """Return the folder of the only decoder in /proc."""
    (child,) = photos._processes._idle
    return Path("/proc", str(child._process.pid))


def test_a_decoder_outlives_the_signals_of_its_server_and_one_that_ends_or_hangs_refuses_its_photo_alone(
    scene: Pixels, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = encode(Image.fromarray(scene), "TIFF")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(photo)
        first = process_of(photos)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server answers its last requests first
            header = photos.read_header(photo)
            os.kill(int(first.name), number)
            header.open()
            assert process_of(photos) == first
        header = photos.read_header(photo)
        os.kill(int(first.name), signal.SIGKILL)
        with raises_code("image_damaged", match="its decoder ended"):
            header.open()
        assert apart(photos.decode(photo), scene) == 0
        header, second = photos.read_header(photo), process_of(photos)
        assert second != first and not first.exists()
        os.kill(int(second.name), signal.SIGSTOP)
        monkeypatch.setattr(decoder_processes, "TIMEOUT_S", 0.1)
        with raises_code("image_damaged", match="took too long"):
            header.open()
        assert not second.exists()
        monkeypatch.undo()
        photos.decode(photo)
        third = process_of(photos)
    assert not third.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the environment of a protected process")
def test_a_decoder_has_neither_files_nor_secrets_nor_core_dumps(scene: Pixels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_MASTER_KEY", "secret")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(heic(Image.fromarray(scene)))
        process = process_of(photos)
        limits = (process / "limits").read_text()
        assert re.search(r"Max open files +0 +0 ", limits) and re.search(r"Max core file size +0 +0 ", limits)
        assert b"KITH_MASTER_KEY" not in (process / "environ").read_bytes()
