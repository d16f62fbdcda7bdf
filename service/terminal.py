"""Tables in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000


def print_table(table: Table) -> None:
    """Wider than the terminal, rather than with a column cut or folded that is ``no_wrap``: what has ids is copied."""
    console = Console()
    least = Measurement.get(console, console.options.update(width=UNBOUNDED), table).minimum
    Console(width=max(console.width, least)).print(table)
