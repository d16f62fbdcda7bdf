"""What lies in a run's directory: its settings, its checkpoint, its log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from training.config import ConfigError, RunConfig

CHECKPOINT = "checkpoint.pt"
CONFIG = "config.json"
LOSSES = "losses.csv"
VALIDATION = "validation.csv"


def read_run(output: Path) -> RunConfig:
    """The settings of the run that was begun in ``output``.

    Raises:
        ConfigError: there is none, or its data is not where it was.
    """
    return replace(RunConfig.from_dict(read_json(output / CONFIG)), output=output)


def record_config(output: Path, config: dict[str, Any], checkpoint: Path, free: tuple[str, ...]) -> None:
    """Write config.json; a run with a checkpoint may only be resumed as it was begun, but for the ``free`` settings.

    Raises:
        ConfigError: another setting differs; the error names it.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / CONFIG
    config = json.loads(json.dumps(config))
    if checkpoint.exists() and path.exists():
        before, now = (dict(_leaves(document)) for document in (read_json(path), config))
        changed = sorted(k for k in before | now if before.get(k) != now.get(k) and k.rsplit(".", 1)[-1] not in free)
        if changed:
            raise ConfigError(f"{output} was begun with other settings ({', '.join(changed)}); choose another --output")
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
    """What a run saved, on the CPU.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return document


def averaged_weights(checkpoint: Path) -> dict[str, Any]:
    """The state dict of a run's averaged network.

    Raises:
        ConfigError: there is no checkpoint.
    """
    weights: dict[str, Any] = load_checkpoint(checkpoint)["averaged"]
    return weights


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    """A reader sees the old file or the new one, also after a power cut."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
