"""A plain loop over photos with insightface.app.FaceAnalysis, in its own process: no server, one client."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.load import Tally, Worker


def _analyzer(pack: Path) -> Callable[[tuple[Sequence[bytes], float, float]], Tally]:
    import cv2
    import numpy as np

    warnings.simplefilter("ignore")
    from insightface.app import FaceAnalysis

    analysis = FaceAnalysis(name=str(pack), providers=["CPUExecutionProvider"])
    analysis.prepare(ctx_id=-1, det_size=(640, 640))

    def work(order: tuple[Sequence[bytes], float, float]) -> Tally:
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
        return tally

    return work


class Loop(Worker):
    """A running loop."""

    def __init__(self, pack: Path) -> None:
        super().__init__(_analyzer, pack)

    def run(self, photos: Sequence[bytes], seconds: float, warm_up_s: float) -> Tally:
        tally: Tally = self.ask((photos, seconds, warm_up_s))
        return tally
