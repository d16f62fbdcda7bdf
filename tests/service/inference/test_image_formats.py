"""Every format that phones, scanners and browsers write, by files that its libraries wrote, compared pixel by pixel."""

from __future__ import annotations

import io
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pillow_heif
import pytest
from numpy.typing import NDArray
from PIL import Image

from service.inference import decoder_processes
from service.inference.images import ImageLimits, PhotoDecoder
from tests.refusals import raises_code
from tests.service.inference.image_files import (
    HEIC,
    QUICK,
    SMALL,
    decode,
    encode,
    exif_of,
    heic,
    heic_claiming,
    heic_grid,
    oriented,
    png,
    stored,
)

Pixels = NDArray[np.uint8]
LIMITS = ImageLimits(5_000_000, 4_000_000)
EXACT: dict[str, dict[str, Any]] = {
    "WEBP": {"lossless": True},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    "MPO": {"quality": 98, "subsampling": 0},
    "JPEG": {"quality": 98, "subsampling": 0},
}
Sample = tuple[str, bytes, Pixels, float]
"""Name, file, pixels that it shows upright, and the largest mean difference of the levels."""


def apart(decoded: Pixels, expected: Pixels) -> float:
    """Mean difference of the levels; of other shapes, infinite."""
    if decoded.shape != expected.shape:
        return float("inf")
    return float(np.abs(decoded.astype(int) - expected).mean())


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


def turned(photo: Pixels) -> Iterator[Sample]:
    """HEIF properties rotate the image; the EXIF orientation is not applied again."""
    for orientation in range(1, 9):
        for kind in ("PNG", "WEBP", "TIFF", "AVIF", "MPO"):
            payload = oriented(photo, orientation, kind, **EXACT.get(kind, {}))
            yield f"{kind} {orientation}", payload, photo, 2
        payload = heic(Image.fromarray(stored(photo, orientation)), exif=exif_of(orientation).tobytes())
        tag = payload.index(struct.pack(">HHI", 0x0112, 3, 1))
        assert payload[tag + 9] == orientation and (b"irot" in payload or b"imir" in payload) == (orientation > 1)
        for said in (orientation, 1, 6):
            other = payload[: tag + 8] + struct.pack(">H", said) + payload[tag + 10 :]
            yield f"HEIC {orientation}, said to be {said}", other, photo, 2


def modes_of_pillow(photo: Pixels) -> Iterator[Sample]:
    modes = {"GIF": "L P RGBA", "BMP": "L P 1", "PNG": "L LA P 1 RGBA", "TIFF": "L P 1 RGBA CMYK"}
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
    yield "as phones do", heic(image, quality=70, chroma=420), photo, 6
    grays, deep = np.repeat(photo[..., :1], 3, 2), photo.astype(np.uint16) * 257
    for mode, sent, expected in (("RGB;16", deep, photo), ("I;16", deep[..., 0], grays)):
        buffer, pixels = io.BytesIO(), np.ascontiguousarray(sent).tobytes()
        pillow_heif.encode(mode, image.size, pixels, buffer, quality=-1, chroma=444, enc_params=QUICK)
        yield mode, buffer.getvalue(), expected, 1.5
    tile = Image.fromarray(photo[:64, :64])
    yield "a grid", heic_grid(1, 2, 190, 128, heic(tile)), np.tile(np.asarray(tile), (2, 3, 1))[:, :190], 2
    avif = encode(image, "AVIF", **EXACT["AVIF"])
    yield "an AVIF of a brand for all codecs", avif[:8] + b"mif1" + avif[12:], photo, 2
    several = pillow_heif.HeifFile()
    for one in (Image.new("RGB", (640, 480), "blue"), image, Image.new("RGB", (16, 16), "red")):
        several.add_from_pillow(one)
    buffer = io.BytesIO()
    several.save(buffer, quality=-1, chroma=444, primary_index=1, enc_params=QUICK)
    yield "the primary of several", buffer.getvalue(), photo, 2


def more_than_8_bits(photo: Pixels) -> Iterator[Sample]:
    """The high byte is kept. The brightest pixel of a gray file decides, so that values may fill fewer bits."""
    gray, grays = photo[..., 0].astype(np.int32), np.repeat(photo[..., :1], 3, 2)
    for bits in (8, 16, 24, 31):
        yield f"{bits} of 32", encode(Image.fromarray(gray << bits - 8), "TIFF"), grays, 1
    for bits in (8, 10, 12, 14, 16):
        for kind in ("TIFF", "PNG"):
            image = Image.fromarray((gray << bits - 8).astype(np.uint16))
            yield f"{kind}, {bits} of 16", encode(image, kind), grays, 1
    for suffix in (".png", ".tiff"):
        yield suffix, written_by_opencv(suffix, photo[..., ::-1].astype(np.uint16) << 8 | 0x80), photo, 0.6
    options = [cv2.IMWRITE_AVIF_DEPTH, 10, cv2.IMWRITE_AVIF_QUALITY, 95, cv2.IMWRITE_AVIF_SPEED, 9]
    yield ".avif", written_by_opencv(".avif", photo[..., ::-1].astype(np.uint16) * 257 >> 6, *options), photo, 2.5


def first_of_several(photo: Pixels) -> Iterator[Sample]:
    """Frames, pages, and motion photos: a video behind a JPEG, or in a box of its own behind a HEIC."""
    first, blank = Image.fromarray(photo), Image.new("RGB", photo.shape[1::-1], "blue")
    for kind in ("GIF", "PNG", "WEBP", "AVIF", "TIFF", "MPO"):
        several = encode(first, kind, save_all=True, append_images=[blank, blank], **EXACT.get(kind, {}))
        yield kind, several, photo, 10
    video = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + np.random.default_rng(0).bytes(200_000)
    yield "HEIC", heic(first) + struct.pack(">I", len(video) + 8) + b"mpvd" + video, photo, 2
    yield "JPEG", encode(first, "JPEG", **EXACT["JPEG"]) + video, photo, 2


FAMILIES = (turned, modes_of_pillow, transparency, heics, more_than_8_bits, first_of_several)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_pixels_are_those_that_were_encoded(family: Callable[[Pixels], Iterator[Sample]], astronaut: Pixels) -> None:
    """No two turns and reflections of the photo are alike; its sides have even and odd length."""
    for name, payload, expected, tolerance in family(np.ascontiguousarray(astronaut[:320:2, :254:2])):
        assert apart(decode(payload, LIMITS), expected) < tolerance, name


def avif_claiming(width: int, height: int, payload: bytes) -> bytes:
    """Change the image sizes in the boxes, and not those in its data."""
    for at in [found.end() + 4 for found in re.finditer(b"ispe", payload)]:
        payload = payload[:at] + struct.pack(">II", width, height) + payload[at + 8 :]
    return payload


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "image_empty"),
    "zeros": (b"\0" * 100, "image_format"),
    "a video": (b"\0\0\0\x18ftypisom\0\0\0\0mp42isom" + bytes(100), "image_format"),
    **{kind: (encode(SMALL, kind), "image_format") for kind in ("PPM", "ICO", "EPS", "JPEG2000")},
    "too many bytes": (b"x" * (LIMITS.max_bytes + 1), "image_too_large"),
    "100 megapixels in a header": (png(10_000, 10_000, rows=b""), "image_too_large"),
    "a HEIC of fewer pixels": (heic_claiming(8, 8, HEIC), "image_damaged"),
    "a HEIC of a few more pixels": (heic_claiming(54, 70, HEIC), "image_damaged"),
    "a HEIC of 4 exapixels": (heic_claiming(0x7FFFFFFF, 0x7FFFFFFF, HEIC), "image_damaged"),
    "a HEIC without its end": (HEIC[: int(len(HEIC) * 0.9)], "image_damaged"),
    "an AVIF of more pixels": (
        avif_claiming(100, 100, encode(Image.new("RGB", (7200, 7000)), "AVIF", speed=10)),
        "image_damaged",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_photo_too_large_or_lies_about_its_size_is_refused(case: str) -> None:
    payload, code = REFUSED[case]
    with raises_code(code):
        decode(payload, LIMITS)


# Processes of decoders


def process_of(photos: PhotoDecoder) -> Path:
    """Return the folder of the only decoder in /proc."""
    (child,) = photos._processes._idle
    return Path("/proc", str(child._process.pid))


def test_a_decoder_outlives_the_signals_of_its_server_and_one_that_ends_or_hangs_refuses_its_photo_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    photo = encode(SMALL, "TIFF")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(photo)
        first = process_of(photos)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server answers its last requests first
            header = photos.read_header(photo)
            os.kill(int(first.name), number)
            header.decode()
            assert process_of(photos) == first
        header = photos.read_header(photo)
        os.kill(int(first.name), signal.SIGKILL)
        with raises_code("image_damaged", match="its decoder ended"):
            header.decode()
        assert apart(photos.decode(photo), np.asarray(SMALL)) == 0
        header, second = photos.read_header(photo), process_of(photos)
        assert second != first and not first.exists()
        os.kill(int(second.name), signal.SIGSTOP)
        monkeypatch.setattr(decoder_processes, "TIMEOUT_S", 0.1)
        with raises_code("image_damaged", match="took too long"):
            header.decode()
        assert not second.exists()
        monkeypatch.undo()
        photos.decode(photo)
        third = process_of(photos)
    assert not third.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the environment of a protected process")
def test_a_decoder_has_neither_files_nor_secrets_nor_core_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_MASTER_KEY", "secret")
    with closing(PhotoDecoder(LIMITS)) as photos:
        photos.decode(HEIC)
        process = process_of(photos)
        limits = (process / "limits").read_text()
        assert re.search(r"Max open files +0 +0 ", limits) and re.search(r"Max core file size +0 +0 ", limits)
        assert b"KITH_MASTER_KEY" not in (process / "environ").read_bytes()
