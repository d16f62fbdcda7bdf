"""Process memory protection: no core dump, and no access by other processes of the user."""

from __future__ import annotations

import subprocess
import sys

PR_GET_DUMPABLE = 3


def test_core_limit_and_dumpable_flag_are_set() -> None:
    program = (
        "from service.security.process_memory import protect_memory; protect_memory(); import ctypes, resource; "
        f"print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout.strip() == "(0, 0) 0", told.stderr
