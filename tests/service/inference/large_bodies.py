"""Encoded photos of any size, and the memory that decoding one, or a server that gets many at once, takes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import cv2
import httpx2 as httpx
import numpy as np
import pillow_heif
from PIL import Image

from bench.servers import Running
from service.cli.tools.demo import package_file

TIMEOUT_S: Final = 600.0
PROGRAM: Final = """
import json, re, sys
from pathlib import Path
from service.core.allocator import return_large_buffers
from service.inference.images import ImageLimits, PhotoDecoder
status, photos = Path("/proc/self/status"), PhotoDecoder(ImageLimits(10**9, 10**9))
small, large = (Path(name).read_bytes() for name in sys.argv[1:])
return_large_buffers()
photos.read_header(small).open().decode()  # imports and caches
before = int(re.search(r"VmRSS:\\s+(\\d+)", status.read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
header = photos.read_header(large)
picture = header.open().decode()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
print(json.dumps([(peak - before) * 1024, header.peak_bytes, picture.photo.height * picture.photo.width]))
"""


def encoders(photo: Image.Image) -> dict[str, Callable[[], bytes]]:
    """Return functions that encode the photo, by the name of the format."""
    with_alpha = photo.copy()
    with_alpha.putalpha(200)
    deep = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) << 8)
    return {
        "JPEG": partial(encode, photo, "JPEG"),
        "JPEG, progressive": partial(encode, photo, "JPEG", progressive=True),
        "JPEG, CMYK": partial(encode, photo.convert("CMYK"), "JPEG"),
        "PNG": partial(encode, photo, "PNG", compress_level=1),
        "PNG, transparent": partial(encode, with_alpha, "PNG", compress_level=1),
        "PNG, 16-bit gray": partial(encode, deep, "PNG", compress_level=1),
        "WebP": partial(encode, photo, "WEBP", method=0),
        "WebP, transparent": partial(encode, with_alpha, "WEBP", method=0),
        "TIFF": partial(encode, photo, "TIFF", compression="tiff_adobe_deflate"),
        "GIF": partial(encode, photo.convert("P"), "GIF"),
        "BMP, 1 bit": partial(encode, photo.convert("1"), "BMP"),
        "AVIF": partial(encode, photo, "AVIF", speed=10),
        "AVIF, transparent": partial(encode, with_alpha, "AVIF", speed=10),
        "HEIC": partial(encode_heic, photo),
        "HEIC, transparent": partial(encode_heic, with_alpha),
    }


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_heic(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, quality=50, enc_params={"preset": "ultrafast"})
    return buffer.getvalue()


def photo_of(megapixels: float) -> Image.Image:
    """Return the group photo of the package insightface, with an aspect ratio of 4:3 and few levels."""
    with Image.open(package_file("insightface", "data", "images", "t1.jpg")) as image:
        pixels = np.asarray(image.convert("RGB"))
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    enlarged = np.asarray(cv2.resize(pixels, (round(height * 4 / 3), height), interpolation=cv2.INTER_CUBIC), np.uint8)
    return Image.fromarray(enlarged & 0xF0)  # so that 48 megapixels fit in 20 MB


def measure_decoding(small: bytes, large: bytes) -> tuple[int, int, int]:
    """Return the measured and the estimated peak in bytes for decoding ``large``, and its pixels.

    ``small``: photo of the same format, decoded first.
    """
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("small", "large")]
        for file, payload in zip(files, (small, large), strict=True):
            file.write_bytes(payload)
        done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, files)], check=True, capture_output=True)
    measured, estimated, pixels = json.loads(done.stdout)
    return measured, estimated, pixels


def family_bytes(pid: int) -> int:
    """Return the memory of a process and its children in bytes, without code and other files."""
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    memory = "".join(Path(f"/proc/{each}/status").read_text() for each in (pid, *children))
    return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"(?:RssAnon|RssShmem):\s+(\d+)", memory))


class PeakWatch:
    """Highest memory of a running process and its children in bytes, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.005):
            self.peak_bytes = max(self.peak_bytes, family_bytes(self._pid))


def send_at_once(server: Running, payload: bytes, photos: int) -> int:
    """Send copies of a photo at once. Return by how many bytes the memory of the server grew at most."""

    def send(_: int) -> int:
        headers = {"Content-Type": "application/octet-stream"}
        url = f"{server.url}/v1/detect"
        return httpx.post(url, content=payload, headers=headers, timeout=TIMEOUT_S).status_code

    with ThreadPoolExecutor(photos) as threads:
        assert set(threads.map(send, range(photos))) == {200}  # starts all processes
        before = family_bytes(server.pid)
        with PeakWatch(server.pid) as watch:
            assert set(threads.map(send, range(photos))) == {200}
    return watch.peak_bytes - before
