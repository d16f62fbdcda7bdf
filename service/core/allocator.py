"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
THRESHOLD_BYTES: Final = 8 << 20


def return_large_buffers() -> None:
    """Make glibc return freed buffers of 8 MB and more to the system. Other C libraries do so by default.

    By default glibc raises this threshold to 32 MB as large buffers are freed. The memory pool of each thread then
    keeps freed buffers of decoded photos, which together exceed the photos that are decoded at once.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
