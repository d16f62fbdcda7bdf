"""Memory that this process may use: physical memory, and the limits of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

CGROUP_FILES: Final = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
"""Mount point and limit file by controllers: of cgroup version 2, whose list is empty, and of version 1."""


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
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in CGROUP_FILES:
                mount, name = CGROUP_FILES[controller]
                group = PurePosixPath(path.lstrip("/"))
                # A parent may have the lower limit. In a container, only the mount point may exist.
                for folder in (group, *group.parents):
                    yield from _read_limit(root / mount / folder / name)


def _read_limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return
    if text.isdigit():  # "max": no limit
        yield int(text)
