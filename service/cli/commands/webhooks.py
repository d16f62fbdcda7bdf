"""``kith webhook``: receivers of events (docs/events.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.calls import add_call
from service.cli.options import CommandGroup, EventTypes, MinRisk, OnlyGalleries, Outcomes
from service.cli.terminal import print_line, print_note

if TYPE_CHECKING:
    from kith.wire.webhooks import CreatedWebhookOut, WebhookOut, WebhookTestOut

app = CommandGroup(help="Send events to other services, check and repeat it.", no_args_is_help=True)


def _state(webhook: WebhookOut) -> str:
    return "off" if webhook.off else "works" if webhook.failing_since is None else f"fails: {webhook.error}"


def _print_created(webhook: CreatedWebhookOut) -> None:
    print_note(f"Created webhook {webhook.id}. Save its secret now, with which the receiver checks signatures:")
    print_line(webhook.secret)


def _print_test(result: WebhookTestOut) -> None:
    print_line("Delivered" if result.delivered else f"Not delivered: {result.error or f'HTTP {result.status}'}")


add_call(
    app,
    "list",
    "webhooks",
    ("Webhook=id", "name", "url", _state, "Waiting=waiting_count"),
    nothing="No webhooks. 'kith webhook create URL' creates one.",
)
add_call(
    app,
    "create",
    "create_webhook",
    _print_created,
    url=Annotated[str, typer.Argument(help="Address that KITH_WEBHOOK_HOSTS allows.")],
    name=Annotated[str | None, typer.Option(help="Label.")],
    types=EventTypes,
    galleries=OnlyGalleries,
    outcomes=Outcomes,
    min_risk=MinRisk,
)
add_call(app, "test", "test_webhook", _print_test, note="Exit status 1 if that is not 2xx.", success="delivered")
add_call(app, "replay", "replay_webhook", "{0.replayed_count} events are sent again to webhook {webhook}")
add_call(app, "delete", "delete_webhook", "Deleted webhook {0.id}", confirm="Delete webhook {webhook}?")
