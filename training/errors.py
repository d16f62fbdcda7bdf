"""Errors that end a command with one line and an exit code."""

from __future__ import annotations


class RunError(RuntimeError):
    """Run that cannot continue. The message says what happened and what to do."""

    exit_code = 2


class RunInterruptedError(RunError):
    """Run stopped by Ctrl-C or SIGTERM after saving a checkpoint. The message says how to resume."""

    exit_code = 130


class NonFiniteLossError(RunError):
    """NaN or infinite loss or gradient. The message names step and cause."""


class ParityError(RunError):
    """onnxruntime and torch disagree; the message says by how much. No file was written."""
