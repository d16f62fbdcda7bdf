"""``kith webhook``: receivers of events (docs/events.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.calls import add_call
from service.cli.connection import connect
from service.cli.options import CommandGroup, EventTypes, MinRisk, OnlyGalleries, Outcomes, ServerOptions
from service.cli.terminal import print_line, print_note

if TYPE_CHECKING:
    from kith.wire.webhooks import WebhookOut, WebhookTestOut

app = CommandGroup(help="Send events to other services, check and repeat it.", no_args_is_help=True)


def _state(webhook: WebhookOut) -> str:
    return "off" if webhook.off else "works" if webhook.failing_since is None else f"fails: {webhook.error}"


def _print_test(result: WebhookTestOut) -> None:
    print_line("Delivered" if result.delivered else f"Not delivered: {result.error or f'HTTP {result.status}'}")


add_call(
    app,
    "list",
    "webhooks",
    ("Webhook=id", "name", "url", _state, "Waiting=waiting_count"),
    nothing="No webhooks. 'kith webhook create URL' creates one.",
)
add_call(app, "test", "test_webhook", _print_test, note="Exit status 1 if that is not 2xx.", success="delivered")
add_call(app, "replay", "replay_webhook", "{0.replayed_count} events are sent again to webhook {webhook}")
add_call(app, "delete", "delete_webhook", "Deleted webhook {0.id}", confirm="Delete webhook {webhook}?")


@app.command()
def create(
    receiver: Annotated[str, typer.Argument(metavar="URL", help="Address that KITH_WEBHOOK_HOSTS allows.")],
    server: ServerOptions,
    name: Annotated[str | None, typer.Option(help="Label.")] = None,
    kind: EventTypes = None,
    gallery: OnlyGalleries = None,
    outcome: Outcomes = None,
    min_risk: MinRisk = None,
) -> None:
    """Create a webhook for the events from now on, and print its secret. The secret cannot be shown again."""
    with connect(server) as kith:
        created = kith.create_webhook(
            receiver,
            name=name,
            types=kind,  # type: ignore[arg-type]
            galleries=gallery,
            outcomes=outcome,  # type: ignore[arg-type]
            min_risk=min_risk,
        )

    def print_text() -> None:
        print_note(f"Created webhook {created.id}. Save its secret now, with which the receiver checks signatures:")
        print_line(created.secret)

    server.answer(created, print_text)
