"""Search of a gallery for the probes of a request, and all that may change the answer to one afterwards.

Other faces of the photo only make an answer more careful: a face that is not identified by itself never becomes
identified (docs/decisions.md, 57).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from models.runtime.network import Float
from service.core import deadlines
from service.core.errors import GalleryNotFoundError, StorageDamagedError
from service.domain.gallery import Gallery, Keys, SubjectLabel
from service.domain.outcomes import RiskTarget
from service.risk.one_face import one_face_per_person
from service.risk.search import Identification
from service.usecases.backend import Backend
from service.usecases.probes import Probe


async def search_gallery(
    backend: Backend,
    gallery: Gallery,
    probes: Float,
    target: RiskTarget,
    k: int,
    among: Keys | None,
) -> tuple[list[Identification], dict[int, SubjectLabel]]:
    """Search (q, d) unit vectors and look up the subjects found, again if one was deleted in between.

    Raises:
        GalleryNotFoundError: the gallery was deleted meanwhile, even if a new gallery has its name.
        StorageDamagedError: the index has a subject that the database does not have.
        DeadlineExceededError, ClientGoneError: the deadline passed, or the client disconnected.
    """
    while True:
        results = await backend.search.identify(gallery, probes, target, k, among)
        keys = {candidate.subject_pk for result in results for candidate in result.ranked}
        named = backend.store.subjects.cached_names(gallery, keys)
        if named is None:
            named = await backend.threads.run(backend.store.subjects.names, gallery, keys)
        if keys <= named.keys():
            return results, named
        deadlines.check()
        current = await backend.find_gallery(gallery.name)
        if current.pk != gallery.pk:
            # The change log has no further entries for the old gallery: its index would keep deleted subjects.
            await backend.threads.run(backend.followers.drop, gallery)
            raise GalleryNotFoundError(f"gallery {gallery.name!r} was replaced by another during the request")
        if current.version == gallery.version:  # deleting a subject would have changed it
            raise StorageDamagedError(f"templates of gallery {gallery.name!r} belong to missing subjects")
        gallery = at_current_version(gallery, current)


def at_current_version(gallery: Gallery, current: Gallery) -> Gallery:
    """Return ``gallery`` at the current version, so that writes during photo processing are found as well."""
    if current.pk != gallery.pk or current.version == gallery.version:
        return gallery
    return replace(
        gallery,
        version=current.version,
        subjects=current.subjects,
        templates=current.templates,
        outsiders=current.outsiders,
    )


def keep_one_face_per_person(probes: Sequence[Probe]) -> None:
    """Identify each person once in each photo. ``other_face`` is a position in ``probes`` afterwards."""
    photos: dict[int, list[int]] = defaultdict(list)
    for row, probe in enumerate(probes):
        if probe.face is not None and probe.found is not None:
            photos[probe.document["image"]].append(row)
    for rows in photos.values():
        found = [result for row in rows if (result := probes[row].found) is not None]
        for row, result in zip(rows, one_face_per_person(found), strict=True):
            other = None if result.other_face is None else rows[result.other_face]
            probes[row].found = replace(result, other_face=other)
