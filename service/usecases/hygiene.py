"""Search for duplicate subjects, mislabeled templates and lookalikes of a gallery."""

from __future__ import annotations

from service.core.errors import GalleryMovedError
from service.domain.findings import HygieneReport
from service.domain.gallery import Gallery
from service.risk.hygiene import find_problems
from service.usecases.backend import Backend


async def inspect_gallery(backend: Backend, gallery: Gallery) -> HygieneReport:
    """Return the findings of a gallery. They are kept until a change: a request that waited finds them.

    Raises:
        RecognizerMismatchError: the gallery's recognizer is not served.
        RiskUncalibratedError: the recognizer has no calibration.
        GalleryNotFoundError: the gallery was deleted meanwhile.
        GalleryMovedError: it was replaced, or moved to another recognizer meanwhile.
    """
    backend.recognizers.for_gallery(gallery)
    store, calibration = backend.store, backend.risks.require_calibration(gallery)

    def inspect() -> HygieneReport:
        current = store.galleries.get(gallery.name)
        if (current.pk, current.fingerprint) != (gallery.pk, gallery.fingerprint):
            raise GalleryMovedError(f"gallery {gallery.name!r} was replaced or moved to another recognizer meanwhile")
        if cached := store.cache.findings.get(current, [None]):
            return cached[None]
        report = find_problems(store.changes.snapshot(current, of_people=True), calibration)
        store.cache.findings.put(current, {None: report})
        return report

    if cached := store.cache.findings.get(gallery, [None]):
        return cached[None]
    return await backend.heavy.run(inspect)
