"""Program that decodes BMP, TIFF, GIF, AVIF and HEIC; service.inference.decoder_processes starts it.

A file of these formats can make its decoder crash, or take far more memory and time than its header suggests. Each
photo may use the memory that was reserved for it and MAX_CPU_S; the process opens neither files nor connections.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import pi_heif
from PIL import AvifImagePlugin, Image

from models.vision.photo_files import HEAD_BYTES, photo_format
from service.core.errors import ImageError
from service.inference.decoding import open_image, read_whole, translated_errors
from service.security.process_memory import protect_memory

FORMATS: Final = ("BMP", "TIFF", "GIF", "AVIF")
"""Formats read with Pillow. HEIC is read with the plugin of libheif."""
LIBRARY_BYTES: Final = 64_000_000
"""Memory that decoders need for a photo of any size, besides that of the idle process."""
MAX_CPU_S: Final = 10
"""Processor time for a photo; an AVIF of 50 megapixels takes 2 s."""


def main() -> None:
    """Answer requests until the parent closes its end of the connection."""
    protect_memory()  # a crash must not write the photo to a core dump
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send them to all processes of a server
        signal.signal(number, signal.SIG_IGN)
    connection, pixels_file = Connection(int(sys.argv[1])), int(sys.argv[2])
    shared = mmap.mmap(pixels_file, 0)
    os.close(pixels_file)
    pi_heif.options.DECODE_THREADS = AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each thread reserves addresses
    pi_heif.options.THUMBNAILS = pi_heif.options.DEPTH_IMAGES = pi_heif.options.AUX_IMAGES = False
    Image.init()  # loads all formats, while files can still be opened
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    while True:
        try:
            request, payload = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except EOFError:
            return
        _limit(used_bytes + LIBRARY_BYTES + request["memory_bytes"])
        try:
            answer = _answer(payload, shared if request["decode"] else None)
        except ImageError as error:
            answer = {"code": error.code, "detail": error.detail, "remedy": error.remedy}
        except MemoryError:
            detail = f"decoding the photo takes more than {request['memory_bytes']} bytes of memory"
            answer = {"code": "image_too_large", "detail": detail, "remedy": None}
        connection.send_bytes(json.dumps(answer).encode())


def _limit(memory_bytes: int) -> None:
    """Limit the addresses of the process, and the processor time of the next photo. Exceeding the latter ends it."""
    cpu_s = int(time.process_time()) + 1 + MAX_CPU_S
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s)):
        _, most = resource.getrlimit(kind)  # of a container, for example
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _answer(payload: bytes, shared: mmap.mmap | None) -> dict[str, Any]:
    """Return the width and height that the header declares, or those of the upright pixels that were written."""
    with translated_errors():
        if shared is None:
            width, height = _open(payload).size
            return {"width": width, "height": height}
        pixels = read_whole(payload, _open(payload))
        height, width = pixels.shape[:2]
        np.frombuffer(shared, np.uint8, pixels.size)[:] = pixels.ravel()  # fails above the pixel limit
        return {"width": width, "height": height}


def _open(payload: bytes) -> Image.Image:
    if photo_format(payload[:HEAD_BYTES]) == "HEIC":
        try:
            return pi_heif.HeifImageFile(io.BytesIO(payload))  # type: ignore[no-any-return]
        except SyntaxError as error:
            raise ImageError("image_format", f"the HEIF file is not supported: {error}") from error
    return open_image(payload, FORMATS)


if __name__ == "__main__":
    main()
