"""Files of a run: settings, checkpoints without NaN and infinite numbers, logs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training import distributed
from training.backbones import build_backbone
from training.config import ConfigError, RunConfig
from training.data.identities import IdentitySet
from training.errors import NON_FINITE_REMEDY, NonFiniteLossError

CHECKPOINT = "checkpoint.pt"
CONFIG = "config.json"
LOSSES = "losses.csv"
ANGLES = "angles.csv"
VALIDATION = "validation.csv"
WORST_PAIRS = "worst_pairs.png"
PEOPLE = "people.json"
"""Names of the people that a run trains on, for messages. The checkpoint has only their hashes."""
MAX_NAMED_CLASSES, MAX_NAMED_VALUES = 3, 5


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
    """Raise ConfigError if a loaded checkpoint was saved with other classes than those of ``data``, or another
    order."""
    saved_ids, ids = checkpoint["classes"].numpy(), data.class_ids
    if np.array_equal(saved_ids, ids):
        return
    new = [data.names[i] for i in np.flatnonzero(~np.isin(ids, saved_ids)).tolist()]
    gone = int((~np.isin(saved_ids, ids)).sum())
    listed = path.with_name(PEOPLE)
    before = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else []
    found = [f"{gone} missing{_named(sorted({*before} - {*data.names}))}"] if gone else []
    found += [f"{len(new)} new or changed{_named(new)}"] if new else []
    raise ConfigError(
        f"{path} was saved with {len(saved_ids)} classes that are not the {len(ids)} of the data: "
        f"{', '.join(found) or 'their order differs'}. Restore the people and their names, or train with another "
        "--output"
    )


def _named(people: Sequence[str]) -> str:
    """Return the first names in brackets, or nothing without any."""
    more = ", ..." if len(people) > MAX_NAMED_CLASSES else ""
    return f" ({', '.join(map(repr, people[:MAX_NAMED_CLASSES]))}{more})" if people else ""


def load_run(output: Path) -> tuple[RunConfig, nn.Module]:
    """Return a run's settings and EMA network, in evaluation mode. Raises ConfigError without a checkpoint."""
    config = read_run_config(output)
    backbone = build_backbone(config.backbone, config.data.crop_px)
    backbone.load_state_dict(load_checkpoint(output / CHECKPOINT)["averaged"])
    return config, backbone.eval().to(distributed.device())


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    """Save so that readers see the old or the new file, even after a power failure. Raises OSError, such as of a full
    disk."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__  # torch hides the error of its stream
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from error
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError if the file does not exist."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: train first")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def require_finite(document: Mapping[str, Any], step: int) -> None:
    """Raise NonFiniteLossError if a tensor or number of a checkpoint is NaN or infinite on any rank.

    Collective.

    Args:
        document: nested mappings and sequences; values other than floating-point tensors and floats are ignored.
        step: step of the checkpoint, for the message.
    """
    broken = [name for name, value in _floats(document) if not bool(torch.isfinite(torch.as_tensor(value)).all())]
    if distributed.any_rank(bool(broken)):
        named = ", ".join(broken[:MAX_NAMED_VALUES]) or "values of another rank"
        raise NonFiniteLossError(
            f"the checkpoint of step {step} is not saved, because values are not finite: {named}. {NON_FINITE_REMEDY}"
        )


def _floats(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _floats(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, part in enumerate(value):
            yield from _floats(part, f"{name}.{i}")
    elif isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
        yield name, value
