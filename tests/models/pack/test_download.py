"""Downloads are complete or fail with a reason, on a real server with faults."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

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


def leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def test_a_download_reports_progress(downloader: Downloader, target: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with serving({"/f": File(CONTENT)}) as server:
        fetched = downloader.fetch(f"{server.url}/f", target, SHA256, len(CONTENT), lambda *done: seen.append(done))
    assert target.read_bytes() == CONTENT
    assert (fetched.sha256, fetched.size, fetched.url) == (SHA256, len(CONTENT), f"{server.url}/f")
    assert without_credentials("https://me:secret@host:81/a/b?token=x") == "https://host:81/a/b"
    assert seen[-1] == ("file.onnx", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert leftovers(target) == []


def test_an_interrupted_download_resumes(downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(CONTENT, cuts=[100_000, 50_000])}) as server:
        downloader.fetch(f"{server.url}/f", target, SHA256)
    assert target.read_bytes() == CONTENT
    assert server.requests == [
        ("/f", None),
        ("/f", "bytes=100000-"),
        ("/f", "bytes=150000-"),
    ]


def test_a_download_without_a_checksum_restarts(downloader: Downloader, target: Path) -> None:
    """A mix of two versions of the file would go unnoticed."""
    with serving({"/f": File(CONTENT, cuts=[1000])}) as server:
        with Downloader(attempts=1) as once, pytest.raises(PullError):
            once.fetch(f"{server.url}/f", target)
        downloader.fetch(f"{server.url}/f", target)
    assert target.read_bytes() == CONTENT
    assert [request[1] for request in server.requests] == [None, None]


@pytest.mark.parametrize(
    ("files", "partial", "requests"),
    [
        ({"/f": File(CONTENT, ranges=False, cuts=[100_000])}, b"", [None, "bytes=100000-"]),
        ({"/f": File(CONTENT)}, CONTENT + b"more", ["bytes=300004-", None]),
        ({"/f": File(b"", location="/r"), "/r": File(CONTENT)}, b"", [None, None]),
        ({"/f": File(CONTENT)}, CONTENT, ["bytes=300000-", None]),
        ({"/f": File(CONTENT)}, b"damaged" * 1000, ["bytes=7000-", None]),
    ],
    ids=["without ranges", "too much was there", "redirected", "all was there", "damaged"],
)
def test_a_file_is_complete_however_it_came(
    files: dict[str, File], partial: bytes, requests: list[str | None], downloader: Downloader, target: Path
) -> None:
    if partial:
        target.with_name("file.onnx.partial").write_bytes(partial)
    with serving(files) as server:
        downloader.fetch(f"{server.url}/f", target, SHA256, len(CONTENT))
        assert [wanted for _, wanted in server.requests] == requests
    assert target.read_bytes() == CONTENT


def test_busy_servers_are_retried(downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(CONTENT, answers=[503, 429, 500])}) as server:
        downloader.fetch(f"{server.url}/f", target, SHA256)
        assert len(server.requests) == 4
        server.files["/f"].answers = [503] * 4
        with pytest.raises(PullError, match="503, 4 times"):
            downloader.fetch(f"{server.url}/f", target, SHA256)


def test_a_wrong_file_is_rejected_and_removed(downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(b"<html>not the file</html>")}) as server:
        with pytest.raises(PullError, match="download_corrupt"):
            downloader.fetch(f"{server.url}/f", target, SHA256)
        assert len(server.requests) == 2
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("size", [1000, len(CONTENT) + 1])
def test_a_file_of_another_size_is_rejected_unread(size: int, downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(CONTENT)}) as server:
        with pytest.raises(PullError, match=f"has 300000 bytes, {size} were expected"):
            downloader.fetch(f"{server.url}/f", target, SHA256, size)
        assert len(server.requests) == 1
    assert list(target.parent.iterdir()) == []


def test_a_response_without_length_is_bounded(downloader: Downloader, target: Path) -> None:
    with serving({"/f": File(CONTENT, stated=False)}) as server:
        assert downloader.fetch(f"{server.url}/f", target, SHA256).size == len(CONTENT)
        with pytest.raises(PullError, match="longer than the 1000 bytes"):
            downloader.fetch(f"{server.url}/f", target.with_name("g"), SHA256, 1000)
    assert list(target.parent.iterdir()) == [target]


def test_rejected_requests_are_not_retried(downloader: Downloader, target: Path) -> None:
    with serving({"/loop": File(b"", location="/loop"), "/private": File(b"", answers=[403])}) as server:
        with pytest.raises(PullError, match="404 Not Found"):
            downloader.fetch(f"{server.url}/gone", target)
        assert len(server.requests) == 1
        with pytest.raises(PullError, match="403"):
            downloader.fetch(f"{server.url}/private", target)
        with pytest.raises(PullError, match="redirect"):
            downloader.fetch(f"{server.url}/loop", target)
    with Downloader() as other, pytest.raises(PullError):
        other.fetch("ftp://127.0.0.1/f", target)


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
