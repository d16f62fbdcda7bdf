"""Errors that end a command with one line and an exit code, and a check of arguments."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


class RunError(RuntimeError):
    """Run that cannot continue. The message says what happened and what to do."""

    exit_code = 2


class RunInterruptedError(RunError):
    """Run stopped by Ctrl-C or SIGTERM after saving a checkpoint. The message says how to resume."""

    exit_code = 130


NON_FINITE_REMEDY = (
    "Lower loop.learning_rate or head.scale, raise loop.warmup, or set loop.precision=fp32. The last checkpoint is kept"
)


class NonFiniteLossError(RunError):
    """NaN or infinite loss or gradient. The message names step and cause."""


class ParityError(RunError):
    """onnxruntime and torch disagree; the message says by how much. No file was written."""
