"""Resumable file downloads over HTTP with retries and checksums.

Proxies and certificate authorities come from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``,
``SSL_CERT_DIR``).
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx2 as httpx

from models.checksums import sha256_of
from models.errors import DiskFullError, DownloadCorruptError, DownloadError

Result = TypeVar("Result")
Progress = Callable[[str, int, int | None], None]
"""Callback with the file name, the bytes so far, and the total size or None."""

MAX_BYTES: Final = 2_000_000_000
"""Size limit of a file of unknown size."""
RETRYABLE_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_BACKOFF_S: Final = 30.0
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
USER_AGENT: Final = "kith-models"

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True)
class DownloadedFile:
    """Completed download. ``url`` is without credentials, ``size`` in bytes."""

    file: str
    url: str
    sha256: str
    size: int


class _RetryableError(Exception):
    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


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
        """Download ``url`` to ``target``, resuming from ``target``.partial.

        Args:
            sha256: expected checksum; None if unknown.
            size: expected bytes; None if unknown.

        Raises:
            DownloadError: all attempts failed, or the server rejected the request.
            DownloadCorruptError: the file had another checksum twice, or another size.
            DiskFullError: the disk is full.
        """
        partial = _Partial(target.with_name(f"{target.name}.partial"))
        actual = ""
        for _ in range(2):  # a corrupt file is downloaded once more
            self._complete(url, partial, sha256, size, progress or (lambda name, done, total: None))
            actual = sha256_of(partial.path)
            if sha256 is None or actual == sha256:
                file = DownloadedFile(target.name, without_credentials(url), actual, partial.size())
                partial.path.replace(target)
                partial.discard()
                return file
            partial.discard()
        raise DownloadCorruptError(
            f"{without_credentials(url)} has sha256 {actual[:12]}..., {str(sha256)[:12]}... was expected"
        )

    def get(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        """Return a small document.

        Raises:
            DownloadError: all attempts failed, or the server rejected the request.
        """

        def request() -> httpx.Response:
            response = self._http.get(url, headers=dict(headers))
            _check_status(response, url)
            return response

        return self._retry(url, request)

    def _complete(self, url: str, partial: _Partial, sha256: str | None, size: int | None, progress: Progress) -> None:
        if size is not None and partial.size() == size:
            return
        try:
            self._retry(url, lambda: self._stream(url, partial, sha256, size, progress))
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFullError(f"no room for {partial.path.name} in {partial.path.parent}") from error
            raise DownloadError(f"{partial.path} cannot be written ({error.strerror})") from error

    def _retry(self, url: str, request: Callable[[], Result]) -> Result:
        problem = ""
        retry_after_s = 0.0
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(min(MAX_BACKOFF_S, max(retry_after_s, self._backoff_s * 2 ** (attempt - 1))))
            try:
                return request()
            except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise DownloadError(f"{without_credentials(url)}: {error}") from error
            except httpx.HTTPError as error:
                problem, retry_after_s = f"{type(error).__name__}: {error}", 0.0
            except _RetryableError as error:
                problem, retry_after_s = str(error), error.retry_after_s
        raise DownloadError(f"{without_credentials(url)}: {problem or 'no answer'}, {self._attempts} times")

    def _stream(self, url: str, partial: _Partial, sha256: str | None, size: int | None, progress: Progress) -> None:
        with self._http.stream("GET", url, headers=partial.range_headers(sha256 is not None)) as response:
            offset = partial.size()
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.discard()
                raise _RetryableError("the partial file is longer than the file on the server")
            _check_status(response, url)
            start = _range_start(response)
            if start not in (0, offset):
                partial.discard()
                raise _RetryableError(f"the server resumed at byte {start}, not {offset}")
            if start == 0:
                partial.begin(response.headers.get("ETag"))
            length = response.headers.get("Content-Length", "")
            content_size = start + int(length) if length.isdigit() else None
            if None not in (content_size, size) and content_size != size:
                partial.discard()
                raise DownloadCorruptError(f"{without_credentials(url)} has {content_size} bytes, {size} were expected")
            total = size if size is not None else content_size
            name = partial.path.name.removesuffix(".partial")
            with partial.path.open("ab") as stream:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    if stream.tell() > (MAX_BYTES if total is None else total):
                        # An endless response must not fill the disk before the checksum is compared.
                        partial.discard()
                        raise DownloadCorruptError(
                            f"{without_credentials(url)} is longer than the {total} bytes expected"
                        )
                    progress(name, stream.tell(), total)
            if total is not None and partial.size() < total:
                raise _RetryableError(f"the response ended at byte {partial.size()} of {total}")


class _Partial:
    """Partial file, with the ETag that tells the server whether its file is still the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._etag = path.with_name(f"{path.name}.etag")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, etag: str | None) -> None:
        self.path.unlink(missing_ok=True)
        # A weak ETag does not guarantee equal bytes.
        if etag and not etag.startswith("W/"):
            self._etag.write_text(etag, encoding="utf-8")
        else:
            self._etag.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)

    def range_headers(self, has_checksum: bool) -> dict[str, str]:
        """Return the headers to resume; none where a mix of two file versions would go unnoticed."""
        etag = self._etag.read_text(encoding="utf-8") if self._etag.exists() else None
        if not self.size() or (etag is None and not has_checksum):
            return {}
        return {"Range": f"bytes={self.size()}-"} | ({} if etag is None else {"If-Range": etag})


def _check_status(response: httpx.Response, url: str) -> None:
    if response.status_code in RETRYABLE_STATUS:
        after = response.headers.get("Retry-After", "")
        raise _RetryableError(f"it answered {response.status_code}", float(after) if after.isdigit() else 0.0)
    if not response.is_success:
        raise DownloadError(f"{without_credentials(url)} answered {response.status_code} {response.reason_phrase}")


def _range_start(response: httpx.Response) -> int:
    if response.status_code != HTTPStatus.PARTIAL_CONTENT:
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1


def without_credentials(url: str) -> str:
    """Return a URL without user, password and query, for messages and records."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
