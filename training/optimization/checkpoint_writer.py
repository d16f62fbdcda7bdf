"""Checkpoints written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class CheckpointWriter:
    """Thread that writes one checkpoint at a time, with ``device`` as the device of its calls."""

    def __init__(self, device: torch.device) -> None:
        def start() -> None:
            if device.type == "cuda":  # torch uses the first GPU in a new thread, whatever the rank
                torch.cuda.set_device(device)

        self._thread = ThreadPoolExecutor(1, "checkpoint", start)
        self._last: Future[None] | None = None

    def wait(self) -> BaseException | None:
        """Wait for the last checkpoint, and return what prevented it."""
        return None if self._last is None else self._last.exception()

    def begin(self, write: Callable[[], None]) -> None:
        """Call ``write`` in the thread."""
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
