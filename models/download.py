"""Files over HTTP that survive interruptions: streamed to a partial file, resumed, checked, and only then renamed.

The one place in ``models`` that knows HTTP. Proxies and certificate authorities come from the environment
(``HTTPS_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``, ``SSL_CERT_DIR``).
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx2 as httpx

from models.errors import DiskFullError, DownloadCorruptError, DownloadError
from models.pack import sha256_of

Result = TypeVar("Result")
Progress = Callable[[str, int, int | None], None]
"""Told the file's name, its bytes so far and, where it is known, its size."""

MAX_BYTES: Final = 2_000_000_000
"""Of a file whose size nobody stated."""
RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_PAUSE_S: Final = 30.0
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
USER_AGENT: Final = "kith-models"

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True)
class Fetched:
    """A file that has arrived: where from, without credentials, and what it is."""

    file: str
    url: str
    sha256: str
    size: int


class _TryAgainError(Exception):
    def __init__(self, problem: str, pause_s: float = 0.0) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


class Downloader:
    """An HTTP client with patience.

    Args:
        attempts: connections for one file, in all.
        pause_s: before the second connection; it doubles with each.
        timeout_s: for the server to say anything.
    """

    def __init__(self, attempts: int = 6, pause_s: float = 1.0, timeout_s: float = 30.0) -> None:
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        self._http = httpx.Client(follow_redirects=True, timeout=timeout_s, headers=headers)
        self._attempts = attempts
        self._pause_s = pause_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def fetch(
        self,
        url: str,
        target: Path,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> Fetched:
        """Bring ``url`` to ``target``, going on from what an earlier call left in ``target``.partial.

        Args:
            sha256: that the file must have; None where nobody states it.
            size: in bytes, where it is known.

        Raises:
            DownloadError: no answer, or a refusal, after all attempts.
            DownloadCorruptError: the file arrived twice with another checksum.
            DiskFullError: as said.
        """
        partial = _Partial(target.with_name(f"{target.name}.partial"))
        found = ""
        for _ in range(2):  # a damaged file is thrown away and fetched anew, once
            self._complete(url, partial, sha256, size, progress or _silent)
            found = sha256_of(partial.path)
            if sha256 is None or found == sha256:
                fetched = Fetched(target.name, without_credentials(url), found, partial.size())
                partial.path.replace(target)
                partial.discard()
                return fetched
            partial.discard()
        raise DownloadCorruptError(
            f"{without_credentials(url)} has sha256 {found[:12]}..., {str(sha256)[:12]}... was expected"
        )

    def get(self, url: str, headers: Mapping[str, str]) -> httpx.Response:
        """A small document, whole.

        Raises:
            DownloadError: no answer, or a refusal, after all attempts.
        """

        def ask() -> httpx.Response:
            response = self._http.get(url, headers=dict(headers))
            _check_status(response, url)
            return response

        return self._patiently(url, ask)

    def _complete(self, url: str, partial: _Partial, sha256: str | None, size: int | None, progress: Progress) -> None:
        if size is not None and partial.size() == size:
            return
        try:
            self._patiently(url, lambda: self._stream(url, partial, sha256, size, progress))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise DiskFullError(f"no room for {partial.path.name} in {partial.path.parent}") from error
            raise DownloadError(f"{partial.path} cannot be written ({error.strerror})") from error

    def _patiently(self, url: str, ask: Callable[[], Result]) -> Result:
        problem = ""
        pause_s = 0.0
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(min(MAX_PAUSE_S, max(pause_s, self._pause_s * 2 ** (attempt - 1))))
            try:
                return ask()
            except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
                raise DownloadError(f"{without_credentials(url)}: {error}") from error
            except httpx.HTTPError as error:
                problem, pause_s = f"{type(error).__name__}: {error}", 0.0
            except _TryAgainError as error:
                problem, pause_s = str(error), error.pause_s
        raise DownloadError(f"{without_credentials(url)}: {problem or 'no answer'}, {self._attempts} times")

    def _stream(self, url: str, partial: _Partial, sha256: str | None, size: int | None, progress: Progress) -> None:
        with self._http.stream("GET", url, headers=partial.range_headers(sha256 is not None)) as response:
            have = partial.size()
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.discard()
                raise _TryAgainError("the server has less than what arrived before")
            _check_status(response, url)
            start = _start_of(response)
            if start not in (0, have):
                partial.discard()
                raise _TryAgainError(f"the server went on from byte {start}, not {have}")
            if start == 0:
                partial.begin(response.headers.get("ETag"))
            length = response.headers.get("Content-Length", "")
            stated = start + int(length) if length.isdigit() else None
            if None not in (stated, size) and stated != size:
                partial.discard()
                raise DownloadCorruptError(f"{without_credentials(url)} has {stated} bytes, {size} were expected")
            total = size if size is not None else stated
            name = partial.path.name.removesuffix(".partial")
            with partial.path.open("ab") as stream:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    if stream.tell() > (MAX_BYTES if total is None else total):
                        # The checksum would say so too, but an endless answer must not fill the disk first.
                        partial.discard()
                        raise DownloadCorruptError(
                            f"{without_credentials(url)} is longer than the {total} bytes expected"
                        )
                    progress(name, stream.tell(), total)
            if total is not None and partial.size() < total:
                raise _TryAgainError(f"the answer ended at byte {partial.size()} of {total}")


class _Partial:
    """What has arrived of a file, and the ETag by which the server will know whether it still is the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._etag = path.with_name(f"{path.name}.etag")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self, etag: str | None) -> None:
        self.path.unlink(missing_ok=True)
        # A weak ETag promises equal meaning, not equal bytes.
        if etag and not etag.startswith("W/"):
            self._etag.write_text(etag, encoding="utf-8")
        else:
            self._etag.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._etag.unlink(missing_ok=True)

    def range_headers(self, checked: bool) -> dict[str, str]:
        """Ask for the rest where a mixture of two versions would be noticed: by the server, or by the checksum."""
        etag = self._etag.read_text(encoding="utf-8") if self._etag.exists() else None
        if not self.size() or (etag is None and not checked):
            return {}
        return {"Range": f"bytes={self.size()}-"} | ({} if etag is None else {"If-Range": etag})


def _check_status(response: httpx.Response, url: str) -> None:
    if response.status_code in RETRIED:
        after = response.headers.get("Retry-After", "")
        raise _TryAgainError(f"it answered {response.status_code}", float(after) if after.isdigit() else 0.0)
    if not response.is_success:
        raise DownloadError(f"{without_credentials(url)} answered {response.status_code} {response.reason_phrase}")


def _start_of(response: httpx.Response) -> int:
    if response.status_code != HTTPStatus.PARTIAL_CONTENT:
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1


def without_credentials(url: str) -> str:
    """An address as it may be shown and recorded."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def _silent(name: str, done: int, total: int | None) -> None:
    pass
