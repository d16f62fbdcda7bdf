"""Lease that a background task renews for as long as it works."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from service.core.actor import Threads
from service.core.errors import KithError
from service.storage.db.leases import Lease


class HeldLease:
    """Lease of this process, for ``lasting_s``. ``store_now``: the time that leases are compared with; it blocks."""

    def __init__(self, lease: Lease, store_now: Callable[[], datetime], lasting_s: float, threads: Threads) -> None:
        self._lease = lease
        self._store_now = store_now
        self._lasting_s = lasting_s
        self._threads = threads
        self._owner = uuid.uuid4().hex
        self._until_s = 0.0
        """End on the monotonic clock."""

    @property
    def is_held(self) -> bool:
        return time.monotonic() < self._until_s

    async def hold(self) -> bool:
        """Acquire the lease, or renew it in its second half; return whether this process holds it."""
        now = time.monotonic()
        if now < self._until_s - self._lasting_s / 2:
            return True
        store_now = await self._threads.run(self._store_now)
        lasting = timedelta(seconds=self._lasting_s)
        held = await self._threads.run(self._lease.acquire, self._owner, store_now, lasting)
        self._until_s = now + self._lasting_s if held else 0.0
        return held

    async def release(self) -> None:
        if self._until_s:
            with suppress(KithError):  # otherwise the lease expires
                await self._threads.run(self._lease.release, self._owner)
