"""A gallery moves to another recogniser: start, how far it is, cut over, roll back, finish."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.context import Context, Kith
from service.api.galleries import GalleryPath
from service.api.migration_schemas import (
    CutOverIn,
    DisagreementOut,
    FinishIn,
    GenerationOut,
    MigrateIn,
    MigrationOut,
    MigrationThresholdOut,
    ShadowOut,
)
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.decision import thresholds_for
from service.errors import RiskUncalibratedError
from service.gallery.generations import DROP, FILL
from service.gallery.subjects import Gallery, Generation

router = APIRouter(
    route_class=Permitted, prefix="/v1/galleries/{gallery}/migrate", tags=["migration"], responses=PROBLEMS
)


@router.post("", status_code=202)
async def start(gallery: GalleryPath, body: MigrateIn, kith: Kith) -> MigrationOut:
    """Begin to move the gallery to another served pack's recogniser, in its shadow; a job embeds the kept crops."""
    to = kith.recognisers.named(body.to)
    await kith.change(gallery, kith.generations.start, to.fingerprint, to.dimension, to.pack.model_id, body.on_sight)
    kith.jobs.wake()
    return await _told(kith, gallery)


@router.get("")
async def get_migration(gallery: GalleryPath, kith: Kith) -> MigrationOut:
    """Which recognisers have seen how many templates, their thresholds, and how the shadow has answered."""
    return await _told(kith, gallery)


@router.post("/cut-over")
async def cut_over(gallery: GalleryPath, body: CutOverIn, kith: Kith) -> MigrationOut:
    """Let the new recogniser answer, from the next request on."""
    await kith.shadow.settle()
    share = 0.0 if body.force else body.min_share
    risk = body.risk.target("fpir") if body.risk else None
    await kith.change(gallery, kith.generations.cut_over, share, risk)
    kith.pipeline.risks.follow(await kith.gallery(gallery))
    return await _told(kith, gallery)


@router.post("/roll-back")
async def roll_back(gallery: GalleryPath, kith: Kith) -> MigrationOut:
    """Let the recogniser before answer again, or end the shadow. Nothing is deleted."""
    await kith.change(gallery, kith.generations.roll_back)
    kith.jobs.wake()
    return await _told(kith, gallery)


@router.post("/finish")
async def finish(gallery: GalleryPath, body: FinishIn, kith: Kith) -> MigrationOut:
    """Keep only the vectors that answer now: there is no way back afterwards."""
    await kith.change(gallery, kith.generations.finish, body.force)
    kith.jobs.wake()
    return await _told(kith, gallery)


async def _told(kith: Context, name: str) -> MigrationOut:
    await kith.shadow.settle()
    return await kith.change(name, _report, kith)


def _report(gallery: Gallery, kith: Context) -> MigrationOut:
    current, *rest = kith.generations.kept(gallery)
    other = rest[0] if rest else None
    unfinished = kith.jobs.store.list_jobs(gallery, ("queued", "running"), None, 100)
    return MigrationOut(
        gallery=gallery.name,
        state="none" if other is None else "cut_over" if other.state == "previous" else other.state,
        on_sight=other is not None and bool(other.details.get("on_sight")),
        current=_generation(kith, gallery, current),
        other=None if other is None else _generation(kith, gallery, other),
        shadow=None if other is None or other.state == "previous" else _shadow(kith, gallery, other),
        jobs=[job.id for job in unfinished if job.kind in (FILL, DROP)],
    )


def _generation(kith: Context, gallery: Gallery, generation: Generation) -> GenerationOut:
    served = kith.recognisers.get(generation.fingerprint)
    covered = kith.generations.coverage(gallery, generation.number)
    counts = generation.details.get("counts", {})
    return GenerationOut(
        recogniser=generation.fingerprint,
        model=generation.model if served is None else served.pack.model_id,
        served=served is not None,
        dimension=generation.dimension,
        templates=covered.templates,
        embedded=covered.embedded,
        by_crop=counts.get("by_crop", 0),
        by_sight=counts.get("by_sight", 0),
        waiting_with_crop=covered.with_crop,
        waiting_without_crop=covered.without_crop,
        threshold=None if served is None else _threshold(kith, gallery.under(generation.number)),
    )


def _threshold(kith: Context, view: Gallery) -> MigrationThresholdOut | None:
    target = view.settings.risk
    try:
        found = thresholds_for(target, kith.pipeline.risks.of(view), max(1, view.subjects), view.settings.review_factor)
    except RiskUncalibratedError:
        return None
    return MigrationThresholdOut(
        risk={target.kind: target.value},
        threshold=round(found.accept, 4),
        review_threshold=round(found.review, 4),
        source=found.source,
        extrapolated=found.extrapolated,
    )


def _shadow(kith: Context, gallery: Gallery, generation: Generation) -> ShadowOut:
    counts = generation.details.get("counts", {})
    latest = kith.generations.disagreements(gallery, generation)
    keys = sorted({pk for one in latest for pk in one.subject_pks if pk is not None})
    named = kith.store.subjects_by_pk(gallery, keys)
    known: dict[int | None, str] = {pk: subject.id for pk, subject in named.items()}
    return ShadowOut(
        compared=counts.get("compared", 0),
        agreed=counts.get("agreed", 0),
        same_outcome=counts.get("same_outcome", 0),
        same_nearest=counts.get("same_nearest", 0),
        absent=counts.get("absent", 0),
        skipped={word.removeprefix("skipped_"): n for word, n in counts.items() if word.startswith("skipped_")},
        disagreements=[
            DisagreementOut(
                outcome=one.outcomes[0],
                subject=known.get(one.subject_pks[0]),
                similarity=one.similarities[0],
                shadow_outcome=one.outcomes[1],
                shadow_subject=known.get(one.subject_pks[1]),
                shadow_similarity=one.similarities[1],
            )
            for one in latest
        ],
    )
