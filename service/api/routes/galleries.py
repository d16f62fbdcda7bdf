"""Galleries: create, list, configure, inspect, delete."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import Query

from kith.wire.common import LivenessSetting
from kith.wire.erasures import DeletedOut
from kith.wire.fields import Page
from kith.wire.galleries import GalleryIn, GalleryOut, GallerySettingsIn, QualityGateOut
from service.api.http.access import ADMIN, ADMIN_ALL, READ, BackendDep, CallerDep, GalleryDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import GalleryPath, NameCursor, PageLimit
from service.api.routes.erasures import to_deleted_out
from service.core.errors import (
    GalleryNotFoundError,
    RefusedError,
)
from service.domain.gallery import Gallery, GallerySettings
from service.domain.outcomes import to_risk_target
from service.usecases.backend import Backend

routes = router("/v1/galleries", "galleries")
Confirmation = Annotated[
    int, Query(ge=0, description="Number of templates or subjects that a shorter retention_days may erase.")
]


@routes.post(
    "",
    dependencies=[ADMIN_ALL],
    status_code=201,
    openapi_extra=example({"name": "staff", "risk": {"fpir": 0.001}, "retention_days": 365}),
)  # a 409 reveals that a name is taken
async def create_gallery(body: JsonBody[GalleryIn], backend: BackendDep) -> GalleryOut:
    """Create a gallery. Its vectors come from the recognizer of KITH_PACK."""
    settings = change_settings(body, GallerySettings())
    _check_liveness(backend, body.liveness)
    recognizer = backend.recognizers.default
    create = backend.store.galleries.create
    created = await backend.threads.run(create, body.name, recognizer.fingerprint, recognizer.dimension, settings)
    return to_gallery_out(created)


def _check_liveness(backend: Backend, setting: LivenessSetting | None) -> None:
    """Raises liveness_unavailable: liveness is required and the served pack has no liveness model."""
    if setting == "required" and backend.photos.judge is None:
        raise RefusedError("liveness_unavailable", "the served model pack has no liveness model")


@routes.get("", dependencies=[READ])
async def list_galleries(
    backend: BackendDep, caller: CallerDep, cursor: NameCursor = None, limit: PageLimit = 100
) -> Page[GalleryOut]:
    """List the galleries that the key is for, by name."""
    found = await backend.threads.run(backend.store.galleries.list_page, cursor, limit + 1, caller.rights.galleries)
    page = found[:limit]
    more = page[-1].name if len(found) > limit else None
    return Page[GalleryOut](data=[to_gallery_out(g) for g in page], next=more)


@routes.get("/{gallery}", dependencies=[READ])
async def get_gallery(gallery: GalleryDep, backend: BackendDep) -> GalleryOut:
    """Return a gallery's settings, counts, and drift of its decisions from the calibration."""
    drift = await backend.threads.run(backend.watches.drift_of, gallery.pk, gallery.fingerprint)
    return to_gallery_out(gallery).model_copy(update={"drift": drift})


@routes.patch("/{gallery}", dependencies=[ADMIN], openapi_extra=example({"risk": {"fpir": 0.0001}}))
async def update_gallery(
    gallery: GalleryPath, body: JsonBody[GallerySettingsIn], backend: BackendDep, confirm: Confirmation = 0
) -> GalleryOut:
    """Change the given settings of the gallery. The others stay."""
    _check_liveness(backend, body.liveness)
    if (days := body.retention_days) is not None:
        found = await backend.find_gallery(gallery)
        if days < (found.settings.retention_days or math.inf):
            now, retention = datetime.now(UTC), backend.retention
            await backend.threads.run(retention.require_confirmation, found, days, now, confirm)
    updated = await backend.threads.run(backend.store.galleries.update, gallery, partial(change_settings, body))
    backend.risks.derive_later(updated)
    return to_gallery_out(updated)


@routes.delete("/{gallery}", dependencies=[ADMIN])
async def delete_gallery(gallery: GalleryPath, backend: BackendDep) -> DeletedOut:
    """Delete the gallery with all its subjects and templates.

    The response is a receipt. A repeated request gets the same receipt.
    """
    try:
        deleted, receipt = await backend.run_on_gallery(
            gallery, lambda found: backend.store.galleries.delete(found.name)
        )
    except GalleryNotFoundError:
        earlier = await backend.threads.run(backend.store.erasures.of_deleted_gallery, gallery)
        if earlier is None:
            raise
        return to_deleted_out(earlier)
    await backend.threads.run(backend.followers.drop, deleted)
    if backend.shared_engine is not None:
        await backend.threads.run(backend.shared_engine.forget, deleted)
    backend.risks.forget(deleted)
    return to_deleted_out(receipt)


def change_settings(body: GallerySettingsIn, current: GallerySettings) -> GallerySettings:
    """Return the current settings, replaced where the request sets them."""
    nullable = {"retention_days", "remember_strangers_days", "liveness_threshold"}
    given = {
        name: getattr(body, name)
        for name in type(body).model_fields.keys() & vars(current).keys()
        if getattr(body, name) is not None or (name in nullable and name in body.model_fields_set)
    }
    if body.risk:
        given["risk"] = to_risk_target(body.risk, "fpir")
    if body.quality_gate:
        given["quality_gate"] = replace(current.quality_gate, **body.quality_gate.model_dump(exclude_unset=True))
    return replace(current, **given)


def to_gallery_out(gallery: Gallery) -> GalleryOut:
    """Convert a gallery, without drift."""
    settings = gallery.settings
    return GalleryOut(
        name=gallery.name,
        recognizer=gallery.fingerprint,
        dimension=gallery.dimension,
        risk={settings.risk.kind: settings.risk.value},
        quality_gate=QualityGateOut(**vars(settings.quality_gate)),
        subject_count=gallery.subjects,
        template_count=gallery.templates,
        created_at=gallery.created_at,
        **{name: value for name, value in vars(settings).items() if name not in ("risk", "quality_gate")},
    )
