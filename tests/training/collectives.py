"""Counts what the ranks of a tiny run exchange and read in one step. Run by torchrun: DATA OUTPUT SETTINGS_JSON..."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from training import distributed
from training.optimization import loop
from training.recipes import smoke
from training.run.train import train_recognizer

COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")
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
    """Return the step, which also appends its counts; collectives are named as in torch.distributed."""

    def counted(*arguments: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, Reads() as reads:
            result = step(*arguments)
        names = [e.name.removeprefix("c10d::").strip("_") for e in profiler.events() if e.name.startswith("c10d::")]
        plain = {name.replace("_", ""): name for name in COLLECTIVES}
        found.append(Counter(plain.get(name.replace("_", ""), name) for name in names) + Counter(reads=reads.count))
        return result

    return counted


def main() -> None:
    data, output = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
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
