"""Checkpoints written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class CheckpointWriter:
    """Thread that writes one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Call ``write`` in the thread, after the checkpoint before. Raises what prevented that one."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(write)

    def close(self) -> None:
        """Wait for the last checkpoint. Raises what prevented it."""
        self._thread.shutdown()
        if self._last is not None:
            self._last.result()


def copy_to_host(document: Any) -> Any:
    """Return a document of nested mappings and lists with copies of its tensors on the CPU, which steps do not
    change."""
    match document:
        case Tensor():
            return document.detach().to("cpu", copy=True)
        case Mapping():
            return {key: copy_to_host(value) for key, value in document.items()}
        case list():
            return [copy_to_host(value) for value in document]
    return document
