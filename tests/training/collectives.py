"""Counts what the ranks of a tiny run exchange and read in one step. Run by torchrun: DATA OUTPUT SETTINGS_JSON..."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from training import distributed
from training.optimization import loop
from training.recipes import smoke
from training.run.train import train_recognizer

COLLECTIVES = {
    "_allgather_base_": "all_gather_single",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
}
"""Names in torch.distributed by those of the profiler."""
READS = ("__bool__", "__float__", "__int__", "item", "tolist")


class Reads(TorchFunctionMode):
    """Counter of the tensors whose values are asked for: on a GPU, the host waits there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def counting(step: Callable[..., Any], found: list[Counter[str]]) -> Callable[..., Any]:
    """Return the step, which also appends its counts."""

    def counted(*arguments: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, Reads() as reads:
            result = step(*arguments)
        names = [e.name.removeprefix("c10d::") for e in profiler.events() if e.name.startswith("c10d::")]
        found.append(Counter(COLLECTIVES.get(name, name) for name in names) + Counter(reads=reads.count))
        return result

    return counted


def main() -> None:
    data, output = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.compile = partial(torch.compile, backend="eager")
    step = loop.train_step
    with distributed.process_group():
        for i, settings in enumerate(sys.argv[3:]):
            found: list[Counter[str]] = []
            loop.train_step = counting(step, found)
            train_recognizer(smoke(data, output / str(i)).overridden(json.loads(settings)))
            if distributed.rank() == 0:
                # Not the first steps: DistributedDataParallel arranges its buckets in them.
                print(json.dumps(found[-1]), flush=True)


if __name__ == "__main__":
    main()
