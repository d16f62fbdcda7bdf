"""Searches of one index that run as one: the vectors are read once for the probes of all requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from models.runtime.network import Float
from service.core.actor import Threads
from service.domain.gallery import Hit

MAX_PROBES: Final = 64
"""Probes of one search. More gain little, and the first of them wait."""
Found = tuple[list[list[Hit]], int]
"""The hits of each probe, and the number of subjects compared."""
Search = Callable[[Float, int], Found]
"""Function of (q, d) probes and the number of hits of each, which blocks."""


class JointSearch:
    """Turns of the searches of an index: one runs at a time, for all probes that arrived during the one before.

    Use on one event loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next: dict[int, _Together] = {}

    async def run(self, threads: Threads, search: Search, probes: Float, k: int) -> Found:
        """Return the hits of (q, d) probes, as of now or later, by the index's ``search``. Raises what it raises."""
        together = self._next.get(k)
        if together is None or together.count + len(probes) > MAX_PROBES:
            together = self._next[k] = _Together()
            together.search = asyncio.create_task(self._run_next(threads, search, together, k))
        first = together.add(probes)
        # A request that is canceled leaves the others their search.
        hits, subjects = await asyncio.shield(together.search)
        return hits[first : first + len(probes)], subjects

    async def _run_next(self, threads: Threads, search: Search, together: _Together, k: int) -> Found:
        async with self._turn:
            if self._next.get(k) is together:
                del self._next[k]
            return await threads.run(search, np.concatenate(together.probes), k)


class _Together:
    """Probes of several requests, and the task that searches for them."""

    search: asyncio.Task[Found]

    def __init__(self) -> None:
        self.probes: list[Float] = []
        self.count = 0

    def add(self, probes: Float) -> int:
        """Return the position of the first of these probes."""
        first = self.count
        self.probes.append(probes)
        self.count += len(probes)
        return first
