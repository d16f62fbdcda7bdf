"""Deliveries of events to webhooks: those that are due, their results, and which ended ones stay listed.

The deliveries to one webhook about one gallery are a stream. Only its first pending delivery is due; the others wait
for it, so that a receiver gets the events of a gallery in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from kith.wire.common import DeliveryState
from service.core.errors import StorageError
from service.security.sealing import ENCODER
from service.storage.db.engine import Database
from service.storage.db.tables import data_keys, deliveries, events, galleries, leases, webhooks
from service.storage.events.outbox import BUILT_IN, BuiltIn, Webhook, open_event, read_webhooks

BURST: Final = 20
"""Deliveries of a stream that are read, sent and recorded together."""
KEPT: Final[dict[DeliveryState, int]] = {"delivered": 100, "dead": 1000}
"""Ended deliveries of each webhook that stay listed."""
MAX_PENDING: Final = 100_000
"""Pending deliveries of each webhook. The oldest beyond them are dead."""
MAX_AGE: Final = timedelta(days=7)
"""Age at which an event is deleted with its deliveries."""
MAX_KEPT: Final = 100_000
"""Keys of events that stay stored for event streams."""
Stream = tuple[int, int]
"""Keys of a webhook and a gallery."""
_CONFLICT: Final = StorageError("a constraint of the deliveries was violated")


@dataclass(frozen=True)
class Delivery:
    """Delivery as it is listed, with the result of its last attempt."""

    pk: int
    event: str
    type: str
    gallery: str
    state: DeliveryState
    attempts: int
    status: int | None
    error: str | None
    at: datetime
    updated_at: datetime
    next_at: datetime


@dataclass(frozen=True)
class DueDelivery:
    """Delivery to attempt now. ``body``: None if the gallery's key is lost."""

    pk: int
    event: str
    body: bytes | None = field(repr=False)
    attempts: int
    at: datetime


@dataclass(frozen=True)
class Attempt:
    """Result of an attempt. ``next_at``: None once the delivery has ended."""

    pk: int
    state: DeliveryState
    attempts: int
    status: int | None
    error: str | None
    next_at: datetime | None


class DeliveryStore:
    """Deliveries in SQL. Every method is one transaction and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def now(self) -> datetime:
        """Return the time that ``next_at`` is compared with."""
        with self._database.read() as connection:
            return self._database.now(connection)

    def due(self, busy: Collection[Stream], most: int, most_each: int) -> list[tuple[Webhook, int, list[DueDelivery]]]:
        """Return streams that are due and not ``busy``: webhook, gallery key, and deliveries in order.

        With the busy ones, they are at most ``most``, and at most ``most_each`` of one webhook.
        """
        with self._database.read() as connection:
            heads = connection.execute(HEADS, {"now": self._database.now(connection)}).all()
            if not heads:
                return []
            own = webhooks.c.id.not_in(BUILT_IN)
            receivers = {webhook.pk: webhook for webhook in read_webhooks(connection, self._database.vault, own)}
            taken = Counter(webhook_pk for webhook_pk, _ in busy)
            chosen = []
            for webhook_pk, gallery_pk in heads:
                free = taken.total() < most and taken[webhook_pk] < most_each
                if (webhook_pk, gallery_pk) in busy or webhook_pk not in receivers or not free:
                    continue
                taken[webhook_pk] += 1
                rows = connection.execute(BODIES, {"webhook": webhook_pk, "gallery": gallery_pk}).all()
                chosen.append((receivers[webhook_pk], gallery_pk, rows))
        return [(webhook, gallery_pk, [self._due(row) for row in rows]) for webhook, gallery_pk, rows in chosen]

    def due_to_broker(self, most: int) -> list[list[DueDelivery]]:
        """Return deliveries to the MQTT broker in order: those of at most ``most`` galleries."""
        with self._database.read() as connection:
            own = connection.execute(sa.select(webhooks.c.pk).where(webhooks.c.id == "mqtt")).scalar()
            if own is None:
                return []
            heads = HEADS.where(deliveries.c.webhook_pk == own).limit(most)
            due = connection.execute(heads, {"now": self._database.now(connection)}).all()
            bodies = [connection.execute(BODIES, {"webhook": own, "gallery": gallery}).all() for _, gallery in due]
        return [[self._due(row) for row in rows] for rows in bodies]

    def is_pending(self, pk: int) -> bool:
        """Return whether a delivery is still to be sent: neither its webhook nor its event was deleted meanwhile."""
        return self._database.first(STATE, {"delivery": pk}) == ("pending",)

    def record(self, attempts: Iterable[Attempt]) -> None:
        """Store results of attempts. Deliveries that were deleted meanwhile are skipped."""
        with self._database.write(_CONFLICT) as connection:
            now = self._database.now(connection)
            for attempt in attempts:
                values: dict[str, Any] = {**vars(attempt), "updated_at": now}
                pk, next_at = values.pop("pk"), values.pop("next_at")
                values["next_at"] = now if next_at is None else next_at
                # A process that outlived its lease does not undo the result of its successor.
                pending = (deliveries.c.pk == pk) & (deliveries.c.state == "pending")
                connection.execute(deliveries.update().where(pending).values(**values))

    def replay(self, webhook: Webhook) -> int:
        """Make the dead deliveries of a webhook pending; return their number. After a day an event has one attempt."""
        dead = (deliveries.c.webhook_pk == webhook.pk) & (deliveries.c.state == "dead")
        with self._database.write(_CONFLICT) as connection:
            now = self._database.now(connection)
            again = {"state": "pending", "attempts": 0, "status": None, "error": None, "next_at": now}
            return connection.execute(deliveries.update().where(dead).values(**again, updated_at=now)).rowcount

    def list_page(
        self, webhook: Webhook, states: Collection[DeliveryState], before: int | None, limit: int
    ) -> list[Delivery]:
        """Return deliveries of a webhook, latest first: at most ``limit`` before the row key ``before``."""
        query = LISTED.where(deliveries.c.webhook_pk == webhook.pk).order_by(deliveries.c.pk.desc()).limit(limit)
        if states:
            query = query.where(deliveries.c.state.in_(list(states)))
        if before is not None:
            query = query.where(deliveries.c.pk < before)
        with self._database.read() as connection:
            return [Delivery(*row) for row in connection.execute(query)]

    def sweep(self) -> None:
        """Delete what need not stay listed, and end the oldest deliveries of a webhook with too many pending ones."""
        self._end_built_in()
        with self._database.read() as connection:
            now = self._database.now(connection)
            unused = ~sa.exists().where(deliveries.c.event_pk == events.c.pk)
            if connection.execute(sa.select(webhooks.c.pk).where(webhooks.c.id == "stream")).first() is not None:
                last = connection.execute(sa.select(sa.func.max(events.c.pk))).scalar() or 0
                unused &= events.c.pk <= last - MAX_KEPT
            doomed = unused | (events.c.at < now - MAX_AGE)
            pks = connection.execute(sa.select(webhooks.c.pk)).scalars().all()
            surplus = [
                (pk, state, last)
                for pk in pks
                for state, kept in {**KEPT, "pending": MAX_PENDING}.items()
                if (last := connection.execute(_surplus(pk, state, kept)).scalar()) is not None
            ]
            if not surplus and connection.execute(sa.select(events.c.pk).where(doomed).limit(1)).first() is None:
                return
        with self._database.write(_CONFLICT) as connection:
            for pk, state, last in surplus:
                of_webhook = (deliveries.c.webhook_pk == pk) & (deliveries.c.state == state) & (deliveries.c.pk <= last)
                if state == "pending":
                    ended = {"state": "dead", "error": "too many events were waiting", "updated_at": now}
                    connection.execute(deliveries.update().where(of_webhook).values(**ended))
                else:
                    connection.execute(deliveries.delete().where(of_webhook))
            connection.execute(events.delete().where(doomed))

    def _end_built_in(self) -> None:
        """Delete built-in receivers without a claim for ``MAX_AGE``."""
        with self._database.read() as connection:
            now = self._database.now(connection)
            ended = [each for each in BUILT_IN if connection.execute(_unclaimed(each, now)).first() is not None]
        if not ended:
            return
        with self._database.write(_CONFLICT) as connection:
            for receiver in ended:
                # The lease first: a claim at the same time waits for this transaction, and creates both again.
                own = leases.c.name == lease_of(receiver)
                connection.execute(leases.delete().where(own, leases.c.until < now))
                unclaimed = ~sa.exists().where(own)
                connection.execute(webhooks.delete().where(webhooks.c.id == receiver, unclaimed))

    def _due(self, row: sa.Row[*tuple[Any, ...]]) -> DueDelivery:
        document = open_event(self._database.vault, row)
        body = None if document is None else ENCODER.encode(document).encode()
        return DueDelivery(row.pk, row.id, body, row.attempts, row.at)


def lease_of(receiver: BuiltIn) -> str:
    """Return the name of the lease whose end is the end of a built-in receiver."""
    return f"{receiver} events"


def _unclaimed(receiver: BuiltIn, now: datetime) -> sa.Select[int]:
    claimed = sa.exists().where(leases.c.name == lease_of(receiver), leases.c.until >= now)
    return sa.select(webhooks.c.pk).where(webhooks.c.id == receiver, ~claimed)


def _surplus(webhook_pk: int, state: DeliveryState, kept: int) -> sa.Select[int]:
    """Select the latest delivery that is not among the last ``kept``."""
    own = (deliveries.c.webhook_pk == webhook_pk) & (deliveries.c.state == state)
    return sa.select(deliveries.c.pk).where(own).order_by(deliveries.c.pk.desc()).offset(kept).limit(1)


# Built once: building a statement takes longer in SQLAlchemy than SQLite takes to run it.
STATE: Final = sa.select(deliveries.c.state).where(deliveries.c.pk == sa.bindparam("delivery"))
FIRST: Final = (
    sa.select(sa.func.min(deliveries.c.pk))
    .where(deliveries.c.state == "pending")
    .group_by(deliveries.c.webhook_pk, deliveries.c.gallery_pk)
)
HEADS: Final = (
    sa.select(deliveries.c.webhook_pk, deliveries.c.gallery_pk)
    .where(deliveries.c.pk.in_(FIRST), deliveries.c.next_at <= sa.bindparam("now"))
    .order_by(deliveries.c.next_at)
)
BODIES: Final = (
    sa.select(
        *deliveries.c["pk", "gallery_pk", "attempts"],
        *events.c["id", "sealed", "at"],
        *data_keys.c["wrapped", "master_key"],
    )
    .select_from(
        deliveries.join(events, events.c.pk == deliveries.c.event_pk).outerjoin(
            data_keys, data_keys.c.gallery_pk == deliveries.c.gallery_pk
        )
    )
    .where(
        deliveries.c.state == "pending",
        deliveries.c.webhook_pk == sa.bindparam("webhook"),
        deliveries.c.gallery_pk == sa.bindparam("gallery"),
    )
    .order_by(deliveries.c.pk)
    .limit(BURST)
)
LISTED: Final = (
    sa.select(
        deliveries.c.pk,
        *events.c["id", "type"],
        galleries.c.name,
        *deliveries.c["state", "attempts", "status", "error"],
        events.c.at,
        *deliveries.c["updated_at", "next_at"],
    )
    .join(events, events.c.pk == deliveries.c.event_pk)
    .join(galleries, galleries.c.pk == deliveries.c.gallery_pk)
)
