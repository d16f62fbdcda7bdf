"""How fast a server answers: clients that each send their next request when the last one's answer is there."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

WARM_UP: Final = 0.2
"""Of the time that counts, before it."""
PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Asked:
    """A request: ``photos`` in it."""

    path: str
    headers: dict[str, str]
    body: bytes
    photos: int


@dataclass(frozen=True)
class Figures:
    """``p50_ms`` and the like: of requests that were answered with 200; None, where none was. ``failed``: how many
    others, by status, 0 where there was no answer."""

    task: str
    clients: int
    seconds: float
    requests: int
    photos_per_second: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    failed: dict[int, int]


@dataclass
class _Tally:
    latencies_ms: list[float] = field(default_factory=list)
    photos: int = 0
    failed: Counter[int] = field(default_factory=Counter)


def measure_load(
    task: str,
    url: str,
    requests: Sequence[Asked],
    clients: int,
    seconds: float,
    waiting: Callable[[float], object] = lambda _: None,
) -> Figures:
    """So many ``clients`` go through the requests by turns for so many ``seconds``, after a fifth of that which does
    not count. ``waiting`` is told, about ten times a second, of how many seconds are over."""
    begin = time.perf_counter() + WARM_UP * seconds
    end = begin + seconds
    tallies = [_Tally() for _ in range(clients)]
    threads = [
        threading.Thread(target=_client, args=(url, requests, number, clients, begin, end, tally), daemon=True)
        for number, tally in enumerate(tallies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            waiting(min(seconds, max(0.0, time.perf_counter() - begin)))
    latencies = sorted(ms for tally in tallies for ms in tally.latencies_ms)
    failed = sum((tally.failed for tally in tallies), Counter[int]())
    rate = sum(tally.photos for tally in tallies) / seconds
    centiles = [percentile(latencies, share) for share in (0.5, 0.95, 0.99)]
    return Figures(task, clients, seconds, len(latencies), rate, centiles[0], centiles[1], centiles[2], dict(failed))


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The least of them that so large a share does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _client(
    url: str, requests: Sequence[Asked], number: int, clients: int, begin: float, end: float, tally: _Tally
) -> None:
    """What is answered between begin and end counts."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    turn = number * len(requests) // clients
    while (sent := time.perf_counter()) < end:
        asked = requests[turn % len(requests)]
        turn += 1
        try:
            connection.request("POST", parts.path.rstrip("/") + asked.path, asked.body, asked.headers)
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
            time.sleep(0.05)
        now = time.perf_counter()
        if not begin <= now < end:
            continue
        if status == 200:
            tally.latencies_ms.append(1e3 * (now - sent))
            tally.photos += asked.photos
        else:
            tally.failed[status] += 1
    connection.close()
