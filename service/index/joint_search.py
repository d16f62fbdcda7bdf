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
        self._next: dict[int, tuple[list[Float], asyncio.Task[Found]]] = {}

    async def run(self, threads: Threads, search: Search, probes: Float, k: int) -> Found:
        """Return the hits of (q, d) probes, as of now or later, by the index's ``search``. Raises what it raises."""
        waiting, task = self._next.get(k, ([], None))
        if task is None or sum(map(len, waiting)) + len(probes) > MAX_PROBES:
            waiting = []
            task = asyncio.create_task(self._run_next(threads, search, waiting, k))
            self._next[k] = waiting, task
        first = sum(map(len, waiting))
        waiting.append(probes)
        # A request that is canceled leaves the others their search.
        hits, subjects = await asyncio.shield(task)
        return hits[first : first + len(probes)], subjects

    async def _run_next(self, threads: Threads, search: Search, probes: list[Float], k: int) -> Found:
        async with self._turn:
            if k in self._next and self._next[k][0] is probes:
                del self._next[k]
            return await threads.run(search, np.concatenate(probes), k)
