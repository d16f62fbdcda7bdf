"""Shards of the classifier by torch.distributed.checkpoint: every rank writes its own, any number of ranks reads."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training import distributed

SHARDS = "classifier-"
"""Prefix of the folder of a step's shards."""


class ShardsReference(TypedDict):
    """Folder of the shards beside a checkpoint, and the names of their tables."""

    folder: str
    tables: list[str]


def save_shards(
    folder: Path, tables_PD: Mapping[str, Tensor], part: slice, rows: int, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's rows ``part`` of (rows, d) tables on the CPU. Collective in ``group``, which nothing else uses
    meanwhile. When it returns on the first rank, all ranks have written."""
    # Not by _quiet(): a thread must not replace the filters of the process.
    for known in ("torch.distributed is disabled", "Detected an existing checkpoint"):
        warnings.filterwarnings("ignore", known, UserWarning)
    alone = distributed.world_size() == 1
    save(_whole(tables_PD, part, rows, group), checkpoint_id=folder, process_group=group, no_dist=alone)


def load_shards(folder: Path, tables_PD: Mapping[str, Tensor], part: slice, rows: int) -> None:
    """Fill (P, d) tables in place with the rows ``part`` of saved (rows, d) tables. Collective."""
    with _quiet():
        load(_whole(tables_PD, part, rows), checkpoint_id=folder, no_dist=distributed.world_size() == 1)


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
    folder = run / shards["folder"]
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata["weight"]
    weight = torch.empty(cast(TensorStorageMetadata, metadata).size)
    with _quiet():
        load({"weight": weight}, checkpoint_id=folder, no_dist=True)
    return weight


def _whole(
    tables_PD: Mapping[str, Tensor], part: slice, rows: int, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return tables as parts of a whole: shards need not be of equal size."""
    if distributed.world_size() == 1:
        return dict(tables_PD)
    return {
        name: init_from_local_shards(
            [Shard.from_tensor_and_offsets(table, [part.start, 0], distributed.rank())],
            rows,
            table.shape[1],
            process_group=group,
        )
        for name, table in tables_PD.items()
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore torch's notes about its own types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
