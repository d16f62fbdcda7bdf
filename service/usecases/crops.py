"""Read stored face crops."""

from __future__ import annotations

from collections.abc import Sequence

from service.domain.gallery import CropOf
from service.usecases.backend import Backend


async def read_crops(backend: Backend, gallery_name: str, wanted: Sequence[CropOf]) -> list[bytes | None]:
    """Return the encoded crops in the order of ``wanted``, None if none is stored. One audit line records them all.

    Raises GalleryNotFoundError, and AuditWriteError if the line must be written first and cannot be.
    """
    gallery = await backend.find_gallery(gallery_name)
    images = await backend.threads.run(backend.store.crops.read, gallery, wanted)
    shown = [one for one, image in zip(wanted, images, strict=True) if image is not None]
    await backend.audit.crops_read(gallery, shown)
    return images
