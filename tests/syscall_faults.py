"""System calls that fail in a Python process, by a seccomp filter of the kernel. Needs no root and no file system.

Faults of file systems, such as locks that fail on NFS, then reach SQLite as on a real mount.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
NUMBERS: Final = {
    "x86_64": {"fcntl": 72, "flock": 73, "mmap": 9, "openat": 257, "pwrite64": 18, "write": 1},
    "aarch64": {"fcntl": 25, "flock": 32, "mmap": 222, "openat": 56, "pwrite64": 68, "write": 64},
}
"""Numbers of the system calls by machine."""
TMPFILE: Final = 0o20000000
"""The bit of O_TMPFILE that O_DIRECTORY does not have."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_BITS, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
FIRST_ARGUMENT: Final = 16
"""Offset of the arguments in struct seccomp_data, 8 bytes each."""


@dataclass(frozen=True)
class Fault:
    """A system call that fails with an error number if one of its arguments compares with a value."""

    call: str
    error: int
    argument: int
    comparison: int
    value: int


def failing_locks(error: int = errno.ENOLCK) -> list[Fault]:
    """fcntl locks fail, by default as on NFS without its lock service."""
    return [Fault("fcntl", error, 1, JUMP_EQUAL, fcntl.F_SETLK), Fault("fcntl", error, 1, JUMP_EQUAL, fcntl.F_SETLKW)]


def failing_folder_locks() -> list[Fault]:
    """flock locks fail, as on NFS for files opened for reading."""
    return [Fault("flock", errno.EBADF, 1, JUMP_BITS, fcntl.LOCK_EX)]


def failing_shared_memory() -> list[Fault]:
    """Shared mappings fail, as on file systems without them."""
    return [Fault("mmap", errno.ENODEV, 3, JUMP_BITS, mmap.MAP_SHARED)]


def read_only_files() -> list[Fault]:
    """No file can be opened for writing, as on a file system mounted read-only."""
    bits = os.O_WRONLY | os.O_RDWR | os.O_CREAT | TMPFILE
    return [Fault("openat", errno.EROFS, 2, JUMP_BITS, bits)]


def full_disk() -> list[Fault]:
    """Writes into files fail."""
    return [Fault(call, errno.ENOSPC, 0, JUMP_GREATER, 2) for call in ("pwrite64", "write")]


def install(*faults: Fault) -> None:
    """Let the system calls of this process fail from now on."""
    numbers = NUMBERS[platform.machine()]
    program = [(LOAD, 0, 0, 0)]
    for fault in faults:
        program += [
            (JUMP_EQUAL, 0, 4, numbers[fault.call]),
            (LOAD, 0, 0, FIRST_ARGUMENT + 8 * fault.argument),
            (fault.comparison, 0, 1, fault.value),
            (RETURN, 0, 0, FAIL | fault.error),
            (LOAD, 0, 0, 0),
        ]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    # The arguments are variadic, so that ctypes must pass each as 64 bits.
    arguments = [ctypes.c_ulong(value) for value in (1, 0, 0, 0)]
    if libc.prctl(PR_SET_NO_NEW_PRIVS, *arguments):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS failed")
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.c_char_p(head)):
        raise OSError(ctypes.get_errno(), "the kernel accepts no seccomp filter")


def run_failing(program: str, *faults: Fault, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program whose ``install_faults()`` makes the system calls fail."""
    # These tests are no package of the environment, and the program may run in another folder.
    start = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.syscall_faults import Fault, install\ndef install_faults(): install(*{list(faults)!r})\n"
    )
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", start + program], capture_output=True, text=True, timeout=120, check=False, **options
    )
