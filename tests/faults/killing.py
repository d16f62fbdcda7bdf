"""Processes that report each step until they are killed, and cases of kills: a preparation, a step, what must hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.forks import CONTEXT
from tests.postgres import DatabaseUrl

WORD_TIMEOUT_S: Final = 180
END_TIMEOUT_S: Final = 600


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Process:
    """Run ``step(*arguments, pipe)`` in a separate process. Its messages are read as they arrive, so that those before
    a kill are known.
    """

    def __init__(self, step: Callable[..., None], *arguments: Any) -> None:
        self._said: list[Any] = []
        self._is_over = False
        self._heard = threading.Condition()
        pipe, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=step, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._reader = threading.Thread(daemon=True, target=self._read, args=(pipe,))
        self._reader.start()

    def _read(self, pipe: Any) -> None:
        with suppress(EOFError, OSError):  # EOFError: killed in the middle of a message
            while True:
                message = pipe.recv()
                with self._heard:
                    self._said.append(message)
                    self._heard.notify_all()
        with self._heard:
            self._is_over = True
            self._heard.notify_all()

    def wait_for(self, words: int) -> None:
        """Wait for a number of messages, or for the end of the process."""
        with self._heard:
            arrived = self._heard.wait_for(lambda: self._is_over or len(self._said) >= words, WORD_TIMEOUT_S)
        assert arrived, f"no word after {self._said[-1:]}"

    def kill(self) -> None:
        self._process.kill()

    def ended(self) -> list[Any]:
        """Return all messages after the process was killed or succeeded."""
        self._process.join(END_TIMEOUT_S)
        self._reader.join(WORD_TIMEOUT_S)
        assert self._process.exitcode in (0, -9)
        return self._said


@dataclass
class Scene:
    """Database and file of a case. ``known``: what the case remembers from kill to kill."""

    another_url: DatabaseUrl
    path: Path
    url: str = field(init=False)
    known: Any = None

    def __post_init__(self) -> None:
        self.url = self.another_url()


@dataclass(frozen=True)
class Case:
    """What to prepare, the step to be killed, and what must hold afterwards.

    Attributes:
        step: runs as ``step(url, path, pipe)`` in a process of its own, and sends a message after each part.
        holds: ``holds(scene, said, ended)`` checks the database after each kill, and after a run to the end.
        kills: number of kills.
        words, delay_s: bounds of the messages before a kill, and of the time after them.
        ends: whether the step ends by itself.
    """

    prepare: Callable[[Scene], None]
    step: Callable[[str, Path, Any], None]
    holds: Callable[[Scene, list[Any], bool], None]
    kills: int
    words: tuple[int, int] = (1, 2)
    delay_s: float = 0.05
    ends: bool = True
