"""Scripted responses for tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.scripted import Answer

BUSY = Answer(503, b'{"code": "overloaded", "detail": "the queue is full"}', {"Retry-After": "0"})
LIMITED = Answer(429, b'{"code": "too_many_streams"}', {"Retry-After": "1"})
BROKEN = Answer(breaks=True)
LOST = Answer(504, b'{"code": "node_lost"}')
OK = Answer()
ENROLLED = Answer(201, b'{"subject": "ada", "enrolled_count": 0, "results": []}')


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new event loop."""
    return asyncio.run(work)
