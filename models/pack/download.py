"""Resumable file downloads over HTTP with retries and checksums.

Proxies and certificate authorities come from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``,
``SSL_CERT_DIR``).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

import httpx2 as httpx

from models.checksums import sha256_of
from models.errors import PullError

Progress = Callable[[str, int, int | None], None]
"""Callback with the file name, the bytes so far, and the total size or None."""

MAX_BYTES: Final = 2_000_000_000
"""Size limit of a file of unknown size."""
RETRYABLE_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_BACKOFF_S: Final = 30.0
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
USER_AGENT: Final = "kith-models"


@dataclass(frozen=True)
class DownloadedFile:
    """Completed download. ``url`` is without credentials, ``size`` in bytes."""

    file: str
    url: str
    sha256: str
    size: int


class Downloader:
    """HTTP client with retries and exponential backoff.

    Args:
        attempts: maximum requests for one file.
        backoff_s: delay before the first retry; it doubles with each retry.
        timeout_s: timeout for connecting and for each read.
    """

    def __init__(self, attempts: int = 6, backoff_s: float = 1.0, timeout_s: float = 30.0) -> None:
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        self._http = httpx.Client(follow_redirects=True, timeout=timeout_s, headers=headers)
        self._attempts = attempts
        self._backoff_s = backoff_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fetch(
        self,
        url: str,
        target: Path,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> DownloadedFile:
        """Download ``url`` to ``target``, unless it is there with this checksum. With one, an earlier attempt resumes
        from ``target``.partial.

        Args:
            sha256: expected checksum; None if unknown.
            size: expected bytes; None if unknown.

        Raises:
            OSError: the file cannot be written.
            PullError: download_failed: all attempts failed, or the server rejected the request.
            PullError: download_corrupt: the file had another checksum or size twice.
            PullError: disk_full: the disk is full.
        """
        if sha256 is not None and target.is_file() and sha256_of(target) == sha256:
            return DownloadedFile(target.name, without_credentials(url), sha256, target.stat().st_size)
        partial = target.with_name(f"{target.name}.partial")
        for _ in range(2):  # a corrupt file is downloaded once more
            self._complete(url, partial, sha256 is not None, size, progress or (lambda name, done, total: None))
            file = DownloadedFile(target.name, without_credentials(url), sha256_of(partial), partial.stat().st_size)
            if file.sha256 == (sha256 or file.sha256) and file.size == (size or file.size):
                partial.replace(target)
                return file
            partial.unlink()
        found, expected = f"{file.size} bytes, sha256 {file.sha256[:12]}...", f"{size or '?'} and {str(sha256)[:12]}..."
        raise PullError("download_corrupt", f"{file.url} has {found}; {expected} were expected")

    def _complete(self, url: str, partial: Path, resume: bool, size: int | None, progress: Progress) -> None:
        """Request the file until ``partial`` is complete. ``resume``: a mix of two versions would be noticed."""
        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(min(MAX_BACKOFF_S, self._backoff_s * 2 ** (attempt - 1)))
            try:
                self._stream(url, partial, resume, size, progress)
                return
            except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise PullError("download_failed", f"{without_credentials(url)}: {error}") from error
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except OSError as error:
                if error.errno in DISK_FULL_ERRNOS:
                    raise PullError("disk_full", f"no room for {partial.name} in {partial.parent}") from error
                raise
        raise PullError("download_failed", f"{without_credentials(url)}: {problem}, {self._attempts} times")

    def _stream(self, url: str, partial: Path, resume: bool, size: int | None, progress: Progress) -> None:
        held = partial.stat().st_size if resume and partial.exists() else 0
        headers = {"Range": f"bytes={held}-"} if held else {}
        with self._http.stream("GET", url, headers=headers) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink()
                raise httpx.RemoteProtocolError("the partial file is longer than the file on the server")
            if response.status_code in RETRYABLE_STATUS:
                raise httpx.RemoteProtocolError(f"it answered {response.status_code}")
            if not response.is_success:
                answer = f"{response.status_code} {response.reason_phrase}"
                raise PullError("download_failed", f"{without_credentials(url)} answered {answer}")
            if response.status_code != HTTPStatus.PARTIAL_CONTENT:
                held = 0
            length = response.headers.get("Content-Length", "")
            total = held + int(length) if length.isdigit() else size
            name, limit = partial.name.removesuffix(".partial"), size or total or MAX_BYTES
            with partial.open("ab" if held else "wb") as stream:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    if stream.tell() > limit:
                        # An endless response must not fill the disk before the checksum is compared.
                        partial.unlink()
                        raise PullError(
                            "download_corrupt", f"{without_credentials(url)} is longer than the {limit} bytes expected"
                        )
                    progress(name, stream.tell(), total)


def without_credentials(url: str) -> str:
    """Return a URL without user, password and query, for messages and records."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
