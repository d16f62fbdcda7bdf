"""Measure the CPU time of encryption: per megabyte of files, and per gallery key.

python -m bench.sealing
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

from service.security.master_keys import LocalKey
from service.security.sealed_files import SealedFile, TemporaryFile
from service.security.sealing import Seal, new_key

MEGABYTES = 200
PIECE = bytes(256 * 1024)
KEYS = 2000


def cpu(work: Callable[[], object]) -> float:
    """Return the minimum seconds of three runs."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, file = Path(folder) / "plain", SealedFile(Path(folder) / "sealed", Seal(new_key()), "bench")

        def write_plain() -> None:
            with plain.open("wb") as to:
                for _ in range(MEGABYTES * 4):
                    to.write(PIECE)

        def write() -> None:
            with file.writing() as to:
                for _ in range(MEGABYTES * 4):
                    to.write(PIECE)
                to.finish()

        for name, work in (
            ("plain file, written", write_plain),
            ("sealed file, written", write),
            ("plain file, read", lambda: _read(plain.open("rb"))),
            ("sealed file, read", lambda: _read(file.open("rb"))),
            ("sealed temporary file, written and read", _temporary),
        ):
            print(f"{name:42} {1000 * cpu(work) / (MEGABYTES * 1.048576):6.2f} ms of CPU per MB")
    master = LocalKey(new_key())
    wrapped = [master.wrap(new_key(), "gallery") for _ in range(KEYS)]
    each = cpu(lambda: [Seal(master.unwrap(key, "gallery")) for key in wrapped]) / KEYS
    print(f"{'a gallery, opened':42} {1e6 * each:6.1f} us of CPU, once per process")


def _read(file: IO[bytes]) -> None:
    with file:
        while file.read(len(PIECE)):
            pass


def _temporary() -> None:
    with closing(TemporaryFile(Path(tempfile.gettempdir()))) as file:
        for _ in range(MEGABYTES * 4):
            file.write(PIECE)
        with file.reader() as reader:
            while reader.read(len(PIECE)):
                pass


if __name__ == "__main__":
    main()
