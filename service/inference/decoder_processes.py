"""Child processes that decode BMP, TIFF, GIF, AVIF and HEIC, so that a hostile file ends no more than its decoder."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from service.core.errors import ImageError

TIMEOUT_S: Final = 60.0
"""Longest wait for an answer. The limit of processor time, MAX_CPU_S of the program, usually ends a photo before."""
PROGRAM: Final = "service.inference.decoder_child"


class DecoderProcesses:
    """Up to ``count`` child processes. Each is started when all others are busy. Thread-safe.

    Args:
        max_pixels: pixels of the largest photo.
    """

    def __init__(self, count: int, max_pixels: int) -> None:
        self._places = threading.BoundedSemaphore(count)
        self._idle: deque[_Child] = deque()
        self._max_pixels = max_pixels

    def read_size(self, payload: bytes) -> tuple[int, int]:
        """Return the width and height in pixels that the header of a photo declares.

        Raises:
            image_damaged, image_format, image_too_large: The header cannot be read.
        """
        answer, _ = self._ask(payload, 2 * len(payload), decode=False)
        return answer["width"], answer["height"]

    def decode(self, payload: bytes, memory_bytes: int) -> NDArray[np.uint8]:
        """Return the upright photo, (h, w, 3) uint8 RGB.

        Raises:
            image_damaged, image_format, image_too_large: The photo cannot be decoded within its memory.
        """
        return self._ask(payload, memory_bytes, decode=True)[1]

    def close(self) -> None:
        """End all idle processes. The others end with their photo."""
        while self._idle:
            self._idle.pop().end()

    def _ask(self, payload: bytes, memory_bytes: int, decode: bool) -> tuple[dict[str, Any], NDArray[np.uint8]]:
        """Return the answer of a process, and the pixels of a decoded photo, else none."""
        with self._places:
            try:
                child = self._idle.pop()
            except IndexError:
                child = _Child(self._max_pixels)
            answer = child.ask(payload, memory_bytes, decode)
            failed = "code" in answer
            size = (answer["height"], answer["width"]) if decode and not failed else (0, 0)
            pixels = child.take_pixels(*size)
            self._idle.append(child)
        if failed:
            raise ImageError(answer["code"], answer["detail"], answer["remedy"])
        return answer, pixels


class _Child:
    """One process."""

    def __init__(self, max_pixels: int) -> None:
        pixels_file = os.memfd_create("kith-pixels")
        os.ftruncate(pixels_file, 3 * max_pixels)
        self._shared = mmap.mmap(pixels_file, 0)
        self._connection, theirs = Pipe()
        files = (theirs.fileno(), pixels_file)
        # No other variable, because some are secrets. A single arena, because each reserves addresses.
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
            [sys.executable, "-m", PROGRAM, *map(str, files)],
            pass_fds=files,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a decoder that ends its process may print data of the photo
        )
        theirs.close()
        os.close(pixels_file)

    def ask(self, payload: bytes, memory_bytes: int, decode: bool) -> dict[str, Any]:
        """Return the answer of the program.

        Raises:
            image_damaged: The process has ended, or was ended after TIMEOUT_S.
        """
        request = {"memory_bytes": memory_bytes, "decode": decode}
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            self._connection.send_bytes(payload)
            if not self._connection.poll(TIMEOUT_S):
                raise EOFError
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.end()
            raise ImageError(
                "image_damaged", "the photo cannot be decoded: its decoder ended, or took too long"
            ) from error
        return answer

    def take_pixels(self, height: int, width: int) -> NDArray[np.uint8]:
        """Return the (h, w, 3) pixels of the last photo, and give their shared memory back."""
        pixels = np.frombuffer(self._shared, np.uint8, 3 * height * width).reshape(height, width, 3).copy()
        self._shared.madvise(mmap.MADV_REMOVE)
        return pixels

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._shared.close()
