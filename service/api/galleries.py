"""Galleries: create, list, settings, delete."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.api.context import Context, Kith
from service.api.openapi import PROBLEMS
from service.api.permissions import Asking, Permitted
from service.api.schemas import (
    PLACE,
    WITHOUT_NUL,
    DeletedOut,
    DriftOut,
    GalleriesOut,
    GalleryIn,
    GalleryName,
    GalleryOut,
    GallerySettingsIn,
    GalleryStatsOut,
    IndexOut,
    RetentionAppliedOut,
    RetentionIn,
    RetentionOut,
)
from service.errors import InvalidRequestError, LivenessUnavailableError
from service.gallery.sealed_rows import open_place
from service.gallery.subjects import GallerySettings, LivenessSetting
from service.security.sealing import Seal, SealBrokenError

router = APIRouter(route_class=Permitted, prefix="/v1/galleries", tags=["galleries"], responses=PROBLEMS)
GalleryPath = Annotated[GalleryName, Path(examples=["staff"])]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=128, pattern=WITHOUT_NUL, description="'next' of the page before.")]
PlaceCursor = Annotated[str | None, Query(pattern=PLACE, description="'next' of the page before.")]


def place_in(seal: Seal, cursor: str | None) -> int | None:
    """The key after which a page begins. Raises InvalidRequestError: no page of this list ended there."""
    place = places_in(seal, cursor, 1)
    return None if place is None else place[0]


def places_in(seal: Seal, cursor: str | None, numbers: int) -> tuple[int, ...] | None:
    """As :func:`place_in`, of a list in the order of so many numbers."""
    if cursor is None:
        return None
    wrong = InvalidRequestError("cursor: it is not 'next' of a page of this list")
    try:
        place = open_place(seal, cursor)
    except (ValueError, SealBrokenError) as error:
        raise wrong from error
    if len(place) != numbers:
        raise wrong
    return place


@router.post("", status_code=201)
async def create_gallery(body: GalleryIn, kith: Kith) -> GalleryOut:
    """Create a gallery, whose vectors the recogniser of KITH_PACK makes."""
    settings = body.over(GallerySettings())
    check_liveness(kith, body.liveness)
    recogniser = kith.recognisers.default
    created = await kith.run(
        kith.store.create_gallery, body.name, recogniser.fingerprint, recogniser.dimension, settings
    )
    return GalleryOut.of(created)


def check_liveness(kith: Context, asked: LivenessSetting | None) -> None:
    """Raises LivenessUnavailableError: it is asked for, and nothing here tells it."""
    if asked == "required" and kith.pipeline.judge is None:
        raise LivenessUnavailableError("the pack that is served has no model that tells people from pictures of them")


@router.get("")
async def list_galleries(kith: Kith, caller: Asking, cursor: Cursor = None, limit: Limit = 100) -> GalleriesOut:
    """Those that the key is for."""
    found = await kith.run(kith.store.list_galleries, cursor, limit + 1, caller.rights.galleries)
    page = found[:limit]
    more = page[-1].name if len(found) > limit else None
    return GalleriesOut(galleries=[GalleryOut.of(g) for g in page], next=more)


@router.get("/{gallery}")
async def get_gallery(gallery: GalleryPath, kith: Kith) -> GalleryOut:
    """Settings, counts, and whether its decisions are still what the calibration expects."""
    found = await kith.run(kith.store.gallery, gallery)
    drift = await kith.run(kith.watches.drift_of, found.pk, found.name, found.fingerprint)
    return GalleryOut.of(found).model_copy(update={"drift": DriftOut.of(drift)})


@router.get("/{gallery}/stats")
async def gallery_stats(gallery: GalleryPath, kith: Kith, caller: Asking) -> GalleryStatsOut:
    """What serves the gallery's searches: the kind of index, why, its recall, size, and how far it has followed."""
    found = await kith.run(kith.store.gallery, gallery)
    follower = await kith.pipeline.caught_up(found)
    stats = await kith.run(follower.stats)
    index = IndexOut(**asdict(stats))
    if caller.rights.galleries is not None:
        index.sequence = None
    return GalleryStatsOut(gallery=found.name, subjects=found.subjects, templates=found.templates, index=index)


@router.get("/{gallery}/retention")
async def gallery_retention(gallery: GalleryPath, kith: Kith) -> RetentionOut:
    """What is past the gallery's age, and whether its erasure waits for a confirmation."""
    found, now = await kith.run(kith.store.gallery, gallery), datetime.now(UTC)
    due = await kith.run(kith.retention.due, found, now)
    return RetentionOut(
        gallery=found.name,
        retention_days=found.settings.retention_days,
        now=now,
        due_templates=due.templates,
        due_subjects=due.subjects,
        templates=due.of_templates,
        subjects=due.of_subjects,
        held=kith.retention.needs_confirmation(due),
    )


@router.post("/{gallery}/retention")
async def apply_retention(gallery: GalleryPath, body: RetentionIn, kith: Kith) -> RetentionAppliedOut:
    """Erase what is past the gallery's age, once, if it is no more than was confirmed."""
    now = datetime.now(UTC)
    swept = await kith.change(gallery, kith.retention.erase_due, now, body.templates, body.subjects)
    for changed in swept.galleries:
        kith.pipeline.risks.follow(changed)
    return RetentionAppliedOut(templates=swept.templates, subjects=swept.subjects)


@router.patch("/{gallery}")
async def update_gallery(gallery: GalleryPath, body: GallerySettingsIn, kith: Kith) -> GalleryOut:
    """Change the gallery's default risk, fusion or quality gate; what is not given stays."""
    check_liveness(kith, body.liveness)
    updated = await kith.run(kith.store.update_gallery, gallery, body.over)
    kith.pipeline.risks.follow(updated)
    return GalleryOut.of(updated)


@router.delete("/{gallery}")
async def delete_gallery(gallery: GalleryPath, kith: Kith) -> DeletedOut:
    """Delete the gallery with every subject and template in it."""
    deleted, receipt = await kith.change(gallery, lambda found: kith.store.delete_gallery(found.name))
    await kith.run(kith.followers.drop, deleted)
    if kith.shared_engine is not None:
        await kith.run(kith.shared_engine.forget, deleted)
    kith.pipeline.risks.forget(deleted)
    kith.watches.drop(deleted.pk, deleted.name)
    return DeletedOut.of(receipt)
