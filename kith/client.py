"""The two clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from kith.calls import Calls
from kith.senders import AsyncSender, Sender
from kith.wire.jobs import JobOut


class Kith(Calls, Sender):
    """Client of one server. Thread-safe.

    Safe calls are retried with backoff if the server is busy (429, 503) or the connection is lost (docs/client.md).

    Args:
        url: address of the server, such as http://127.0.0.1:8000; default: KITH_URL.
        api_key: API key, if the server requires one; default: KITH_CLIENT_KEY, or else KITH_API_KEY; "" for none.
        timeout_s: maximum wait for data per attempt, in seconds.
        attempts: maximum number of attempts per call.
        connections: maximum number of connections; further calls wait.

    Raises:
        KithClientError: raised by every method if the server refuses the call or fails.
        KithUnreachableError: raised by every method if the server does not respond.
    """

    def gallery_names(self) -> set[str]:
        """Return the names of all galleries."""
        return {gallery.name for gallery in self.galleries()}

    def wait_for(
        self, job: str, timeout_s: float | None = None, on_update: Callable[[JobOut], object] | None = None
    ) -> JobOut:
        """Poll a job until it finishes; pass each poll to ``on_update``. Raise TimeoutError after ``timeout_s``."""
        delays_s = _poll_delays_s(job, timeout_s)
        while _is_active(found := self.job(job), on_update):
            time.sleep(next(delays_s))
        return found


class AsyncKith(Calls, AsyncSender):
    """Client with the methods and arguments of :class:`kith.Kith`, as coroutines and asynchronous iterators.

    Cancellation closes the connection, and the server stops the work.
    """

    async def gallery_names(self) -> set[str]:
        """Return the names of all galleries."""
        return {gallery.name async for gallery in self.galleries()}

    async def wait_for(
        self, job: str, timeout_s: float | None = None, on_update: Callable[[JobOut], object] | None = None
    ) -> JobOut:
        """Poll a job until it finishes; pass each poll to ``on_update``. Raise TimeoutError after ``timeout_s``."""
        delays_s = _poll_delays_s(job, timeout_s)
        while _is_active(found := await self.job(job), on_update):
            await asyncio.sleep(next(delays_s))
        return found


def _is_active(job: JobOut, on_update: Callable[[JobOut], object] | None) -> bool:
    if on_update is not None:
        on_update(job)
    return job.state in ("queued", "running")


def _poll_delays_s(job: str, timeout_s: float | None) -> Iterator[float]:
    """Yield the delay after each poll of a job. Raise TimeoutError at the deadline."""
    deadline, delay_s = None if timeout_s is None else time.monotonic() + timeout_s, 0.05
    while deadline is None or time.monotonic() <= deadline:
        yield delay_s
        delay_s = min(1.0, delay_s * 1.5)
    raise TimeoutError(f"job {job} did not finish within {timeout_s} s")
