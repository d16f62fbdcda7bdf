"""Files of a run: settings, checkpoint, logs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.config import ConfigError, RunConfig
from training.data.class_ids import require_same_classes
from training.data.identities import IdentitySet
from training.optimization.finite import require_finite

CHECKPOINT = "checkpoint.pt"
CONFIG = "config.json"
LOSSES = "losses.csv"
VALIDATION = "validation.csv"


def read_run_config(output: Path) -> RunConfig:
    """Read the settings of the run in ``output``. Raises ConfigError if there is no run, or its data has moved."""
    return replace(RunConfig.from_dict(read_json(output / CONFIG)), output=output)


def write_run_config(output: Path, config: dict[str, Any], checkpoint: Path, mutable: tuple[str, ...]) -> None:
    """Write config.json. Resuming a checkpoint requires equal settings, except for those in ``mutable``. Raises
    ConfigError if another setting differs; the message names it."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / CONFIG
    config = json.loads(json.dumps(config))
    if checkpoint.exists() and path.exists():
        before, now = (dict(_leaves(document)) for document in (read_json(path), config))
        changed = sorted(k for k in before | now if before.get(k) != now.get(k) and k.rsplit(".", 1)[-1] not in mutable)
        if changed:
            raise ConfigError(
                f"{output} was started with other settings ({', '.join(changed)}). Choose another --output"
            )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)


def _leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU. Raises ConfigError if there is no checkpoint."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return document


def check_classes(checkpoint: Mapping[str, Any], data: IdentitySet, path: Path) -> None:
    """Raise ConfigError if a loaded checkpoint was saved with other classes than those of ``data``."""
    saved: Tensor | None = checkpoint.get("classes")
    require_same_classes(None if saved is None else saved.numpy(), data.class_ids, data.names, path)


def load_ema_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the state dict of the EMA network of a checkpoint. Raises ConfigError if there is no checkpoint."""
    weights: dict[str, Any] = load_checkpoint(checkpoint)["averaged"]
    return weights


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Save the checkpoint of step ``state["step"]`` of a run in one process.

    Raises NonFiniteLossError if a value is NaN or infinite; the earlier checkpoint is kept.
    """
    require_finite(state, int(state["step"]))
    save_atomically(path, state)


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    """Save so that readers see the old or the new file, even after a power failure."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if the file does not exist."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def append_json(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
