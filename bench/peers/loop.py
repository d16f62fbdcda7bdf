"""A plain loop over photos with insightface.app.FaceAnalysis, in its own process: no server, one client."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from bench.load import Tally, Worker


def _work(orders: Connection, pack: Path) -> None:
    import cv2
    import numpy as np

    warnings.simplefilter("ignore")
    from insightface.app import FaceAnalysis

    analysis = FaceAnalysis(name=str(pack), providers=["CPUExecutionProvider"])
    analysis.prepare(ctx_id=-1, det_size=(640, 640))
    orders.send(None)
    while (order := orders.recv()) is not None:
        photos, seconds, warm_up_s = order
        latencies_ms: list[float] = []
        tally, source = Tally(seconds, latencies_ms={200: latencies_ms}), itertools.cycle(photos)
        begin = time.perf_counter() + warm_up_s
        while (start := time.perf_counter()) < begin + seconds:
            found = analysis.get(cv2.imdecode(np.frombuffer(next(source), np.uint8), cv2.IMREAD_COLOR))
            tally.served += 1
            if begin <= (now := time.perf_counter()) < begin + seconds:
                latencies_ms.append((now - start) * 1000)
                tally.faces += len(found)
        orders.send(tally)


class Loop(Worker):
    """A running loop; ``pid`` is its process."""

    def __init__(self, pack: Path) -> None:
        super().__init__(_work, pack)

    def __enter__(self) -> Self:
        super().__enter__()
        self._orders.recv()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def run(self, photos: Sequence[bytes], seconds: float, warm_up_s: float) -> Tally:
        """Run the loop. Raise EOFError if its process ended."""
        self._orders.send((photos, seconds, warm_up_s))
        tally: Tally = self._orders.recv()
        return tally
