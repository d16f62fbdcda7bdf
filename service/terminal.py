"""What is written to a terminal, or into a pipe: answers to stdout; progress, questions and remarks to stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from service.words import CONTROL, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

UNBOUNDED: Final = 10_000
SAID_NO: Final = 1
USAGE: Final = 2
FAILED: Final = 3
INTERRUPTED: Final = 130
"""Of what ended by Ctrl-C."""
NOBODY_READS: Final = 141
"""As a shell says of a process that ended by SIGPIPE. All of them: docs/cli.md."""


class Terminal(Console):
    """Rich's, which shows names and files' names as text, whatever they hold, and leaves it to
    :func:`service.cli.main` what a reader that went away means."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_lines(text), **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout(width: int | None = None) -> Console:
    return Terminal(width=width, highlight=False)


def stderr() -> Console:
    return Terminal(stderr=True, highlight=False)


def remark(text: str) -> None:
    """One line for people, beside the answer."""
    stderr().print(text, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of the answer, as it is."""
    print(_lines(text))


def print_table(table: Table) -> None:
    """Wider than the terminal, rather than with a column cut or folded that is ``no_wrap``: what has ids is copied. In
    a pipe, as wide as it is."""
    console = stdout()
    needed = Measurement.get(console, console.options.update(width=UNBOUNDED), table)
    if console.is_terminal or "COLUMNS" in os.environ:
        stdout(max(console.width, needed.minimum)).print(table)
    else:
        stdout(max(needed.maximum, 1)).print(table)


def print_json(answer: BaseModel | Mapping[str, Any] | Sequence[Any]) -> None:
    """``answer`` may hold models at any depth; they are as REST answers them, what is null among it."""
    text = json.dumps(answer, indent=2, ensure_ascii=False, default=_document)
    lines = (CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))
    print("\n".join(lines))


def _document(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


def _lines(text: str) -> str:
    """Lines are our own."""
    return "\n".join(map(shown, text.split("\n")))


def progress(*columns: ProgressColumn, transient: bool = False) -> Progress:
    """A bar, the columns given, and the time that is left, on stderr; nothing where that is no terminal."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )
