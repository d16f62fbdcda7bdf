"""Shards of the classifier: every rank writes its own rows, and any number of ranks reads them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from training.errors import RunError
from training.optimization.run_folder import save_atomically

SHARDS = "classifier-"
"""Prefix of the folder of a step's shards. A file is named after the first of its rows."""


class ShardsReference(TypedDict):
    """Folder of the shards beside a checkpoint, and the names of their tables."""

    folder: str
    tables: list[str]


def save_shards(folder: Path, tables_PD: Mapping[str, Tensor], part: slice, group: dist.ProcessGroup | None) -> None:
    """Write this rank's rows ``part`` of tables on the CPU. Collective in ``group``, which nothing else uses meanwhile.
    When it returns, all ranks have written. Raises on all ranks if one could not write."""
    failure: OSError | None = None
    try:
        folder.mkdir(exist_ok=True)
        save_atomically(folder / f"{part.start}.pt", dict(tables_PD))
    except OSError as error:
        failure = error
    failed = torch.tensor(int(failure is not None))
    if group is not None:
        dist.all_reduce(failed, group=group)
    if failed:
        raise failure or RunError("another rank could not write its classes. Its error says why")


def load_shards(folder: Path, tables_PD: Mapping[str, Tensor], part: slice) -> None:
    """Fill (P, d) tables in place with the rows ``part`` of the saved tables."""
    for path in folder.glob("*.pt"):
        first = int(path.stem)
        if first >= part.stop:
            continue
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for name, table_PD in tables_PD.items():
            start, stop = max(part.start, first), min(part.stop, first + len(saved[name]))
            if start < stop:
                table_PD[start - part.start : stop - part.start] = saved[name][start - first : stop - first]


def remove_old_shards(run: Path, kept: ShardsReference | None) -> None:
    for folder in run.glob(f"{SHARDS}*"):
        if kept is None or folder.name != kept["folder"]:
            shutil.rmtree(folder)


def read_class_weights(run: Path, checkpoint: Mapping[str, Any]) -> Tensor | None:
    """Return the (C, d) class weights of a run's loaded checkpoint, of all ranks; None for a head without classes."""
    shards: ShardsReference | None = checkpoint.get("shards")
    if shards is None:
        whole: Tensor | None = checkpoint["head"].get("weight")
        return whole
    files = sorted((run / shards["folder"]).glob("*.pt"), key=lambda path: int(path.stem))
    return torch.cat([torch.load(file, map_location="cpu", weights_only=True)["weight"] for file in files])
