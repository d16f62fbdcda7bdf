"""Terminal output and questions: answers go to stdout; progress, notes and questions go to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from service.cli.words import CONTROL_PATTERN, replace_controls
from service.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_TABLE_COLUMNS: Final = 10_000
MAX_LISTED: Final = 10
# Exit statuses, documented in docs/cli.md.
EXIT_NO: Final = 1
EXIT_USAGE: Final = 2
EXIT_FAILED: Final = 3
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""128 + SIGPIPE, as a shell reports it."""
Columns = tuple[str | Callable[[Any], object], ...]
"""Columns of a list: "attribute", "Header=attribute", or a function of an item that is named after the header."""
FIELD_PREFIX: Final = re.compile(r"(^|; )(?:body|path|query)\.")
UNREADABLE: Final = {
    "code": "unreadable",
    "remedy": "Check that the file exists and is readable, then run the command again.",
}
"""Problem of a photo that cannot be read, without its detail."""


class SafeConsole(Console):
    """Rich console that replaces control characters in stored names and raises BrokenPipeError to the caller."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Replace control characters, then render."""
        return super().render_str(_replace_controls(text), **options)

    def on_broken_pipe(self) -> None:
        """Leave the exit status to :func:`service.cli.main.main`."""
        raise BrokenPipeError


def stdout_console(width: int | None = None) -> Console:
    """Return a console on stdout, ``width`` columns wide (default: the terminal's width)."""
    return SafeConsole(width=width, highlight=False)


def stderr_console() -> Console:
    """Return a console on stderr."""
    return SafeConsole(stderr=True, highlight=False)


def print_note(text: str) -> None:
    """Print a message for people to stderr."""
    stderr_console().print(text, markup=False, soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line of the answer to stdout, without control characters."""
    print(_replace_controls(text))


def make_table(*headers: str | Column, rows: Iterable[Iterable[object]], leading: int = 0) -> Table:
    """Return a table without borders. :func:`_cell` says how cells look."""
    table = Table(*headers, box=None, pad_edge=False, padding=(0, 2, 0, 0), leading=leading, show_header=bool(headers))
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def list_table(items: Iterable[object], columns: Columns) -> Table:
    """Return a table of items. Its first column is not wrapped, as it names them."""
    cells = [attrgetter(each.rpartition("=")[2]) if isinstance(each, str) else each for each in columns]
    first, *others = map(_header, columns)
    return make_table(Column(first, no_wrap=True), *others, rows=([cell(item) for cell in cells] for item in items))


def print_first(title: str, lines: Sequence[str], all_of_them: str) -> None:
    """Print the first MAX_LISTED lines, and how many more ``all_of_them`` shows."""
    for line in lines[:MAX_LISTED]:
        print_line(f"{title}: {line}")
    if len(lines) > MAX_LISTED:
        print_line(f"{title}: {len(lines) - MAX_LISTED:,} more{all_of_them}")


def print_refused(refused: Sequence[Mapping[str, Any]], all_of_them: str = ".") -> None:
    """Print the first refused photos, with code and detail, and the remedy of each code."""
    print_first("Refused", [f"{each['photo']}: {each['code']}: {each['detail']}" for each in refused], all_of_them)
    for line in remedy_lines(refused):
        print_line(line)


def print_table(table: Table) -> None:
    """Print a table without cutting its ``no_wrap`` columns, so that ids can be copied.

    The table is wider than the terminal if those columns need it. In a pipe, no column is wrapped.
    """
    console = stdout_console()
    needed = Measurement.get(console, console.options.update(width=MAX_TABLE_COLUMNS), table)
    if console.is_terminal or "COLUMNS" in os.environ:
        stdout_console(max(console.width, needed.minimum)).print(table)
    else:
        stdout_console(max(needed.maximum, 1)).print(table)


def print_json(answer: BaseModel | Mapping[str, Any] | Sequence[Any]) -> None:
    """Print JSON in the form of the REST API, nulls included. ``answer`` may hold models at any depth."""
    text = json.dumps(answer, indent=2, ensure_ascii=False, default=_dump_model)
    lines = (CONTROL_PATTERN.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))
    print("\n".join(lines))


def progress_bar(*columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a progress bar with these columns and the remaining time, hidden if stderr is not a terminal."""
    console = stderr_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


def require_confirmation(question: str, yes: bool) -> None:
    """Ask before an action that cannot be undone, unless ``yes``.

    Raises:
        typer.Exit: the user did not confirm.
        typer.BadParameter: stdin is closed.
    """
    if yes:
        return
    stderr_console().print(f"{question} [y/N]: ", end="", markup=False, soft_wrap=True)
    answer = sys.stdin.readline()
    if not answer:
        stderr_console().print()
        raise typer.BadParameter("There is no terminal to ask. Add this option to confirm.", param_hint="--yes")
    if answer.strip().lower() not in ("y", "yes"):
        print_note("Nothing was changed.")
        raise typer.Exit(EXIT_NO)


def to_the_second(at: datetime) -> str:
    """Return a time in a table of events."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: '1 line', '2 lines'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _header(column: str | Callable[[Any], object]) -> str:
    """Return the header of a column: 'Created (UTC)' of created_at, 'Templates' of template_count."""
    name = column if isinstance(column, str) else column.__name__.strip("_")
    if "=" in name:
        return name.partition("=")[0]
    words = re.sub("_at$", " (UTC)", re.sub("_count$", "s", name)).replace("_", " ")
    return words[0].upper() + words[1:]


def _cell(value: object) -> str | Text:
    """Return a cell: a similarity with 3 decimals, a time to the second, 'yes' or nothing, or else plain text."""
    if isinstance(value, Text):
        return value
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, datetime):
        return to_the_second(value)
    if isinstance(value, list):
        return escape(", ".join(value))
    return "" if value is None else escape(str(value))


def _dump_model(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


def _replace_controls(text: str) -> str:
    return "\n".join(map(replace_controls, text.split("\n")))


def detail_for(problem: Mapping[str, Any]) -> str:
    """Return a problem's detail, without the part of the request that each invalid field belongs to."""
    detail = str(problem.get("detail", ""))
    return FIELD_PREFIX.sub(r"\1", detail) if problem.get("code") == InvalidRequestError.code else detail


def remedy_lines(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line per error code that has a remedy: 'code: remedy'."""
    first: dict[str, str] = {}
    for problem in problems:
        first.setdefault(problem["code"], problem.get("remedy") or "")
    return [f"{code}: {remedy}" for code, remedy in first.items() if remedy]
