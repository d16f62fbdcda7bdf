"""Processes that say what they have done, until they are killed."""

from __future__ import annotations

import threading
from typing import Any, Final

from tests.faults.workers import CONTEXT

WORD_TIMEOUT_S: Final = 180


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Killed:
    """``work(*arguments, pipe)`` in a process of its own, which sends a word for each step that it has done."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=work, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def after(self, words: int, seconds: float) -> list[Any]:
        """Kill it so long after so many words, unless it has ended; return all that it said."""
        said: list[Any] = []
        try:
            while len(said) < words:
                assert self._pipe.poll(WORD_TIMEOUT_S), f"no word after {said[-1:]}"
                said.append(self._pipe.recv())
            pause(seconds)
            self.process.kill()
            while True:
                said.append(self._pipe.recv())
        except (EOFError, OSError):  # the latter: in the middle of a word
            self.process.join(60)
            return said

    def at_its_end(self) -> list[Any]:
        """All that it said, when it has ended by itself."""
        said: list[Any] = []
        try:
            while True:
                said.append(self._pipe.recv())
        except EOFError:
            self.process.join(60)
            assert self.process.exitcode == 0
            return said
