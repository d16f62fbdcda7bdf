"""Downloads are complete or fail with a reason, on a real server with faults."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from models.errors import PullError
from models.pack.download import Downloader, without_credentials
from tests.http_files import File, serving

CONTENT = np.random.default_rng(3).bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def downloader() -> Iterator[Downloader]:
    with Downloader(attempts=4, backoff_s=0.0, timeout_s=60) as opened:
        yield opened


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "file.onnx"


def test_a_download_reports_progress(downloader: Downloader, target: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with serving({"/f": File(CONTENT)}) as server:
        fetched = downloader.fetch(f"{server.url}/f", target, SHA256, len(CONTENT), lambda *done: seen.append(done))
    assert target.read_bytes() == CONTENT
    assert (fetched.sha256, fetched.size, fetched.url) == (SHA256, len(CONTENT), f"{server.url}/f")
    assert without_credentials("https://me:secret@host:81/a/b?token=x") == "https://host:81/a/b"
    assert seen[-1] == ("file.onnx", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


class Case(NamedTuple):
    """``asked``: ranges of the requests. ``there``: of an earlier attempt."""

    file: File | None
    problem: str | None = None
    asked: tuple[str | None, ...] = (None,)
    there: bytes = b""
    sha256: str | None = SHA256
    size: int | None = None


CASES = {
    "interrupted": Case(File(CONTENT, cuts=[100_000, 50_000]), asked=(None, "bytes=100000-", "bytes=150000-")),
    "without a checksum": Case(File(CONTENT, cuts=[1000]), asked=(None, None), there=b"x" * 1000, sha256=None),
    "without ranges": Case(File(CONTENT, ranges=False, cuts=[100_000]), asked=(None, "bytes=100000-")),
    "too much was there": Case(File(CONTENT), asked=("bytes=300004-", None), there=CONTENT + b"more"),
    "all was there": Case(File(CONTENT), asked=("bytes=300000-", None), there=CONTENT),
    "damaged": Case(File(CONTENT), asked=("bytes=7000-", None), there=b"damaged" * 1000),
    "busy": Case(File(CONTENT, answers=[503, 429, 500]), asked=(None,) * 4),
    "too busy": Case(File(CONTENT, answers=[503] * 4), "503, 4 times", (None,) * 4),
    "another file": Case(File(b"<html>not the file</html>"), "download_corrupt", (None,) * 2),
    "shorter than stated": Case(File(CONTENT), "has 300000 bytes.*300001 and", (None,) * 2, size=300_001),
    "longer than stated": Case(File(CONTENT), "longer than the 1000 bytes", size=1000),
    "of no stated length": Case(File(CONTENT, stated=False), size=300_000),
    "longer, of no stated length": Case(File(CONTENT, stated=False), "longer than the 1000 bytes", size=1000),
    "gone": Case(None, "404 Not Found"),
    "refused": Case(File(b"", answers=[403]), "403"),
    "a loop": Case(File(b"", location="/f"), "redirect", (None,) * 21),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_complete_however_it_came_or_nothing_is_left(case: str, downloader: Downloader, target: Path) -> None:
    """Without a checksum it restarts, since a mix of two versions of the file would go unnoticed."""
    file, problem, asked, there, sha256, size = CASES[case]
    if there:
        target.with_name("file.onnx.partial").write_bytes(there)
    files = {} if file is None else {"/f": replace(file, cuts=[*file.cuts], answers=[*file.answers])}
    expectation = nullcontext() if problem is None else pytest.raises(PullError, match=problem)
    with serving(files) as server, expectation:
        downloader.fetch(f"{server.url}/f", target, sha256, size)
    assert tuple(wanted for _, wanted in server.requests) == asked
    assert list(target.parent.iterdir()) == ([target] if problem is None else [])
    assert problem is not None or target.read_bytes() == CONTENT


def test_a_redirect_is_followed_and_other_schemes_are_not(downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(b"", location="/r"), "/r": File(CONTENT)}) as server:
        downloader.fetch(f"{server.url}/f", target, SHA256)
    assert target.read_bytes() == CONTENT
    with pytest.raises(PullError, match="download_failed"):
        downloader.fetch("ftp://127.0.0.1/f", target)


def test_unreachable_and_silent_servers_time_out(target: Path) -> None:
    with Downloader(attempts=2, backoff_s=0.0, timeout_s=0.05) as hasty:
        with pytest.raises(PullError, match="download_failed"):
            hasty.fetch("http://127.0.0.1:9/f", target)
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PullError, match="ReadTimeout"):
            hasty.fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/f", target)


def test_a_full_disk_is_reported(downloader: Downloader, target: Path) -> None:
    target.with_name("file.onnx.partial").symlink_to("/dev/full")
    with serving({"/f": File(CONTENT)}) as server, pytest.raises(PullError, match=r"disk_full.*KITH_MODELS_DIR"):
        downloader.fetch(f"{server.url}/f", target, SHA256)
    assert not target.exists()
