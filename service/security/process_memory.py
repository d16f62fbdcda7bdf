"""Protection of process memory that holds keys and embeddings: no core dumps, no debuggers of the same user."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from typing import Final

PR_SET_DUMPABLE: Final = 4
"""linux/prctl.h"""


def protect_memory() -> None:
    """Disable core dumps and debugging of this process.

    RLIMIT_CORE alone is not enough: where core_pattern names a program, the kernel ignores the limit (core(5)). A
    process that is not dumpable never writes a core dump, and only root can trace it or read its memory (prctl(2)).
    Child processes are dumpable again, within the limit.
    """
    # The parent process may have set a hard limit that this user cannot lower. The dumpable flag still applies.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
