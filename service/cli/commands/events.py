"""``kith events``: events as they happen."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from service.cli.connection import connect
from service.cli.options import ServerOptions
from service.cli.terminal import print_line, to_the_second

if TYPE_CHECKING:
    from kith.wire.events import EventOut

TYPES: Final = (
    "decision",
    "enrollment",
    "stranger_first_seen",
    "stranger_seen_again",
    "threshold_moved",
    "drift",
    "job_finished",
)
OUTCOMES: Final = ("identified", "uncertain", "unknown", "no_face", "rejected_quality", "rejected_liveness")
"""Written again, because the client's types import pydantic, which takes longer than a command's help."""


def events(
    server: ServerOptions,
    gallery: Annotated[list[str], typer.Option("--gallery", "-g", help="Only these galleries.")] = [],  # noqa: B006
    kind: Annotated[
        list[str], typer.Option("--type", help="Only events of these types: " + ", ".join(TYPES) + ".")
    ] = [],  # noqa: B006
    outcome: Annotated[
        list[str],
        typer.Option(help="Only decisions with these outcomes: " + ", ".join(OUTCOMES) + "."),
    ] = [],  # noqa: B006
    min_risk: Annotated[
        float | None, typer.Option(min=0, max=1, help="Minimum false alarm probability of decisions.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="Begin after this position, from --json. Default: now.")] = None,
) -> None:
    """Print events as they happen, one line each, until interrupted (docs/events.md).

    With --json, each line is JSON. If the server is away, it waits and continues without loss."""
    with connect(server) as kith:
        options = {"types": kind or None, "galleries": gallery or None, "outcomes": outcome or None}
        for event in kith.events(after, **options, min_risk=min_risk):  # type: ignore[arg-type]
            print_line(json.dumps(event.model_dump(mode="json")) if server.as_json else _line(event))
            sys.stdout.flush()


def _line(event: EventOut) -> str:
    details = {name: value for name, value in event.data.items() if name != "gallery"}
    words = [str(event.data["gallery"]), *(f"{name}={value}" for name, value in details.items())]
    return "  ".join([to_the_second(event.timestamp), event.type, *words])
