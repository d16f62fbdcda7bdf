"""Conversion of the server's status to responses."""

from __future__ import annotations

from kith.wire.status import BetterPackOut, CheckOut, HeldOut, LagOut, MissesOut, QueueOut, RetentionStatusOut
from service.core.errors import KithError, MasterKeyError
from service.inference.batcher import Batcher
from service.operations.status import Lag, ServiceState
from service.risk.risk_report import ExpectedMisses
from service.security.master_keys import MasterKeys


def to_check_out(name: str, error: KithError | None) -> CheckOut:
    """Convert the result of a readiness check. ``error`` is None if it passed."""
    if error is None:
        return CheckOut(name=name, ok=True)
    return CheckOut(name=name, ok=False, code=error.code, detail=error.detail, remedy=error.remedy)


def to_master_key_out(master: MasterKeys) -> CheckOut | None:
    """Convert the state of the master key's backup. Blocks: it reads files."""
    try:
        backed_up = master.is_backed_up()
    except MasterKeyError as error:
        return to_check_out("master_key", error)
    if backed_up is None:
        return None
    never = MasterKeyError(
        "The master key was never backed up. Without it all stored data is lost.",
        "On the server, run 'kith master backup FILE', and keep FILE on another machine.",
    )
    return to_check_out("master_key", None if backed_up else never)


def to_misses_out(found: ExpectedMisses) -> MissesOut:
    """Convert the expected misses of a pack, rounded to 4 decimals."""
    better = None if found.better is None else BetterPackOut(model=found.better[0], fnir=round(found.better[1], 4))
    return MissesOut(fpir=found.fpir, subjects=found.subjects, fnir=round(found.fnir, 4), better=better)


def to_queue_out(batcher: Batcher[object, object]) -> QueueOut:
    """Convert the state of a batcher's queue."""
    return QueueOut(
        network=batcher.name,
        waiting=batcher.queue.foreground_count,
        background=batcher.queue.background_count,
        batches=batcher.metrics.batches,
        seconds_per_item=batcher.seconds_per_item,
        refused=batcher.metrics.refused,
    )


def to_lag_out(lag: Lag) -> LagOut:
    """Convert the lag of an index behind the change log."""
    return LagOut(lines=lag.lines, seconds=lag.seconds)


def to_retention_status_out(sample: ServiceState) -> RetentionStatusOut:
    """Convert the retention state of a status sample."""
    held = None
    if sample.held is not None:
        held = {
            name: HeldOut(
                due_templates=due.templates,
                due_subjects=due.subjects,
                templates=due.of_templates,
                subjects=due.of_subjects,
            )
            for name, due in sample.held.items()
        }
    return RetentionStatusOut(clock=to_check_out("clock", sample.paused), held=held)
