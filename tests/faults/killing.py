"""Processes that report each step until they are killed."""

from __future__ import annotations

import threading
from typing import Any, Final

from tests.faults.workers import CONTEXT

WORD_TIMEOUT_S: Final = 180


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Killed:
    """Run ``work(*arguments, pipe)`` in a separate process, which sends a message after each step."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=work, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def after(self, words: int, seconds: float) -> list[Any]:
        """Kill the process some time after a number of messages, unless it has ended; return all messages."""
        said: list[Any] = []
        try:
            while len(said) < words:
                assert self._pipe.poll(WORD_TIMEOUT_S), f"no word after {said[-1:]}"
                said.append(self._pipe.recv())
            pause(seconds)
            self.process.kill()
            while True:
                said.append(self._pipe.recv())
        except (EOFError, OSError):  # EOFError: killed in the middle of a message
            self.process.join(60)
            return said

    def at_its_end(self) -> list[Any]:
        """Return all messages after the process ended by itself."""
        said: list[Any] = []
        try:
            while True:
                said.append(self._pipe.recv())
        except EOFError:
            self.process.join(60)
            assert self.process.exitcode == 0
            return said
