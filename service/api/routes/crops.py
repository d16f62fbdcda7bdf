"""Stored face crops, many at once."""

from __future__ import annotations

import base64

from kith.wire.crops import CropOut, CropsIn, CropsOut
from service.api.http.access import READ, BackendDep, router
from service.api.http.bodies import JsonBody
from service.api.http.openapi import example
from service.api.http.parameters import GalleryPath

routes = router("/v1/galleries/{gallery}/crops", "subjects")


@routes.post(
    "",
    dependencies=[READ],
    openapi_extra=example({"crops": [{"subject": "ada"}, {"stranger": "9f86d081884c4d659a2feaa0c55ad015"}]}),
)
async def list_crops(gallery: GalleryPath, body: JsonBody[CropsIn], backend: BackendDep) -> CropsOut:
    """Return the stored crops of subjects, templates, strangers and faces of albums, with one audit line for all.

    It is a POST request because proxies log the ids in a URL. It changes nothing.
    """
    current, wanted = await backend.find_gallery(gallery), body.crops
    images = await backend.threads.run(backend.store.crops.read, current, wanted)
    shown = [one for one, image in zip(wanted, images, strict=True) if image is not None]
    await backend.audit.crops_read(current, shown)
    return CropsOut(data=[CropOut(image=None if one is None else base64.b64encode(one).decode()) for one in images])
