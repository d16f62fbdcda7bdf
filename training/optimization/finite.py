"""Check of checkpoints for NaN and infinite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from training import distributed
from training.errors import NonFiniteLossError
from training.optimization.health import NON_FINITE_REMEDY

MAX_NAMED: Final = 5


def require_finite(document: Mapping[str, Any], step: int) -> None:
    """Raise NonFiniteLossError if a tensor or number of a checkpoint is NaN or infinite on any rank.

    Collective. Waits for the device once, regardless of the number of tensors.

    Args:
        document: nested mappings and sequences; values other than floating-point tensors and floats are ignored.
        step: step of the checkpoint, for the message.
    """
    names, flags = list[str](), list[Tensor]()
    for name, value in _floats(document):
        finite = torch.tensor(math.isfinite(value)) if isinstance(value, float) else torch.isfinite(value).all()
        names.append(name)
        flags.append(finite)
    broken = [name for name, finite in zip(names, _read(flags), strict=True) if not finite]
    if distributed.any_rank(bool(broken)):
        named = ", ".join(broken[:MAX_NAMED]) or "values of another rank"
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


def _read(flags: Sequence[Tensor]) -> list[bool]:
    """Return the values of scalars, with one transfer per device: AdamW keeps its step counters on the CPU."""
    values = [False] * len(flags)
    for device in {flag.device for flag in flags}:
        rows = [i for i, flag in enumerate(flags) if flag.device == device]
        for i, value in zip(rows, torch.stack([flags[i] for i in rows]).tolist(), strict=True):
            values[i] = value
    return values
