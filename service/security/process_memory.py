"""A process that holds keys and people's vectors: no core dump of it, and no debugger of the same user's."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from typing import Final

PR_SET_DUMPABLE: Final = 4
"""linux/prctl.h"""


def keep_to_itself() -> None:
    """For the rest of the process' life. The limit alone would not do: the kernel pipes a dump to a program, where
    core_pattern names one, without regard to it (core(5)); a process that is not dumpable has none (prctl(2)), and only
    root may trace it or read its memory. What it starts is dumpable again, within the limit."""
    # Who started it may have set a hard limit of more than this user may change; then the other one holds.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
