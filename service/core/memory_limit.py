"""Memory that this process may use: physical memory, and the limits of its control groups (cgroup version 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the lowest memory limit of this process in bytes.

    ``root``: root of the file system with proc and sys.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            group = PurePosixPath(line[3:].lstrip("/"))
            # A parent may have the lower limit. In a container, only the mount point may exist.
            for folder in (group, *group.parents):
                yield from _read_limit(root / "sys/fs/cgroup" / folder / "memory.max")


def _read_limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return
    if text.isdigit():  # "max": no limit
        yield int(text)
