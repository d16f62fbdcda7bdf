"""Process memory protection: no core dump, and no access by other processes of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KEPT = "from service.security.process_memory import protect_memory; protect_memory()"
PR_GET_DUMPABLE = 3


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)


def test_core_limit_and_dumpable_flag_are_set(tmp_path: Path) -> None:
    told = run(
        f"{KEPT}; import ctypes, resource; "
        f"print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0))",
        tmp_path,
    )
    assert told.stdout.strip() == "(0, 0) 0", told.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users, and so root")
def test_the_process_can_still_read_its_own_status(tmp_path: Path) -> None:
    """Run as a user without privileges, like in the image."""
    told = run(
        f"{KEPT.replace('protect_memory()', '')}import os; os.setuid(65534); protect_memory(); "
        "print(len(os.listdir('/proc/self/fd')) > 2, 'VmRSS' in open('/proc/self/status').read(), "
        "len(open('/proc/self/maps').read()) > 0, os.stat('/proc/self/ns/pid').st_ino > 0)",
        tmp_path,
    )
    assert told.stdout.strip() == "True True True True", told.stderr
