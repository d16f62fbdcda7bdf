"""What imports and exports have to themselves, so that they do not hold up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple

from service.errors import OverloadedError
from service.gallery.bulk import BulkStore
from service.gallery.database import Database
from service.security.acting import in_context

AT_ONCE: Final = 2
"""Imports that work at the same time, and exports; further ones take turns with them, block by block."""
MOST_EXPORTS: Final = 4
"""Each holds a moment of the database, and a connection to it, for as long as its caller reads."""
WAIT_S: Final = 5

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Transfers:
    """Threads, connections and places. To be made on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database.apart(AT_ONCE + MOST_EXPORTS)
        self._importing = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="imports")
        self._exporting = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="exports")
        self._places = asyncio.Semaphore(MOST_EXPORTS)
        self.bulk = BulkStore(self._database)

    async def importing(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks."""
        return await in_context(self._importing, function, *arguments)

    async def exporting(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run something that blocks."""
        return await in_context(self._exporting, function, *arguments)

    async def begin_export(self) -> None:
        """Whoever returns from here calls :meth:`end_export` later. Raises OverloadedError."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            raise OverloadedError(f"{MOST_EXPORTS} exports are being read") from error

    def end_export(self, close: Callable[[], None]) -> None:
        """Not awaited: if the caller went away, whatever is awaited is cancelled, and the moment must end."""
        closed = asyncio.get_running_loop().run_in_executor(self._exporting, close)
        closed.add_done_callback(lambda _: self._places.release())

    def close(self) -> None:
        self._importing.shutdown()
        self._exporting.shutdown()
        self._database.close()
