"""The two clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kith.calls import Calls
from kith.senders import AsyncSender, Sender
from kith.transport import ACTIVE_STATES, poll_delays_s
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
        for delay_s in poll_delays_s(job, timeout_s):
            found = self.job(job)
            if on_update is not None:
                on_update(found)
            if found.state not in ACTIVE_STATES:
                return found
            time.sleep(delay_s)
        raise AssertionError("unreachable: the delays end by raising")


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
        for delay_s in poll_delays_s(job, timeout_s):
            found = await self.job(job)
            if on_update is not None:
                on_update(found)
            if found.state not in ACTIVE_STATES:
                return found
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: the delays end by raising")
