"""``kith events``: events as they happen."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import connect
from service.cli.options import EventTypes, MinRisk, OnlyGalleries, Outcomes, ServerOptions
from service.cli.terminal import print_line, to_the_second

if TYPE_CHECKING:
    from kith.wire.events import EventOut


def events(
    server: ServerOptions,
    gallery: OnlyGalleries = None,
    kind: EventTypes = None,
    outcome: Outcomes = None,
    min_risk: MinRisk = None,
    after: Annotated[str | None, typer.Option(help="Begin after this position, from --json. Default: now.")] = None,
) -> None:
    """Print events as they happen, one line each, until interrupted (docs/events.md).

    With --json, each line is JSON. If the server is away, it waits and continues without loss."""
    with connect(server) as kith:
        chosen: Any = {"types": kind, "outcomes": outcome}
        for event in kith.events(after, **chosen, galleries=gallery, min_risk=min_risk):
            print_line(json.dumps(event.model_dump(mode="json")) if server.as_json else _line(event))
            sys.stdout.flush()


def _line(event: EventOut) -> str:
    details = {name: value for name, value in event.data.items() if name != "gallery"}
    words = [str(event.data["gallery"]), *(f"{name}={value}" for name, value in details.items())]
    return "  ".join([to_the_second(event.timestamp), event.type, *words])
