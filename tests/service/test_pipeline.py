"""The largest of several faces is chosen alone, and each recogniser gets the crops it was trained on."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.alignment import STANDARD, Alignment, align
from models.detection import Detector
from models.pack import BUNDLED
from models.recognition import Recogniser
from service.api.context import Context
from service.api.identify import _search
from service.app import create_app
from service.client import Kith
from service.errors import GalleryNotFoundError
from service.gallery.database import Database, open_engine
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, NewTemplate
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg


def test_only_the_largest_face_is_identified(kith: Kith, gallery: str, group: NDArray[np.uint8]) -> None:
    everyone = kith.detect(jpeg(group)).images[0].faces
    largest = max(everyone, key=lambda f: (f.box[2] - f.box[0]) * (f.box[3] - f.box[1]))
    (result,) = kith.identify(gallery, jpeg(group), faces="largest", check_quality=False).results
    assert result.face is not None
    assert result.face.box == largest.box


def test_a_recogniser_is_given_crops_by_its_own_alignment(
    kith: Kith, tmp_path: Path, detector: Detector, recogniser: Recogniser, astronaut: NDArray[np.uint8]
) -> None:
    closer = Alignment(112, tuple((1.3 * x - 17, 1.3 * y - 30) for x, y in STANDARD.template))
    pack = Path(shutil.copytree(BUNDLED, tmp_path / "closer"))
    manifest = json.loads((pack / "manifest.json").read_text())
    manifest["tasks"]["recognition"]["alignment"] = {"template": closer.template}
    del manifest["calibration"]  # it is that of other crops, and would be refused
    (pack / "manifest.json").write_text(json.dumps(manifest))
    photo = jpeg(astronaut, 100)
    with embedded(load_settings(pack=pack, data_dir=tmp_path, log_level="WARNING")) as url, Kith(url) as own:
        (found,) = own.embed(photo).images[0].faces
    (usual,) = kith.embed(photo).images[0].faces
    assert found.quality == usual.quality
    (faces,) = detector.detect([astronaut])
    (expected,) = recogniser.embed(align(astronaut, faces.landmarks_xy[:1], closer))
    (standard,) = recogniser.embed(align(astronaut, faces.landmarks_xy[:1]))
    assert float(expected @ np.array(found.embedding)) > 0.99
    assert float(expected @ standard) < 0.98


def test_a_search_ends_though_its_gallery_is_replaced_meanwhile(tmp_path: Path, rng: np.random.Generator) -> None:
    """By another process: one that restores it, or deletes it and makes one of its name."""
    served = load_settings(data_dir=tmp_path, log_level="WARNING")
    other = Store(Database(open_engine(served.sql_url)))

    async def search(context: Context) -> None:
        by = context.recognisers.default
        (vector,) = np.eye(1, by.dimension, dtype=np.float32)

        def made(subject: str) -> Gallery:
            gallery = other.create_gallery("g", by.fingerprint, by.dimension, GallerySettings())
            other.enrol(gallery, subject, [NewTemplate(uuid.uuid4().hex, vector, "embedding")], None)
            return other.gallery("g")

        async def found(gallery: Gallery) -> set[str]:
            async with asyncio.timeout(10):
                _, named = await _search(context, gallery, vector[None], gallery.settings.risk, 5, None)
            return {subject.id for subject in named.values()}

        first = made("before")
        assert await found(first) == {"before"}
        other.delete_gallery("g")
        second = made("after")
        with pytest.raises(GalleryNotFoundError):
            await found(first)
        assert len(context.followers) == 0
        assert await found(second) == {"after"}
        # A subject that is deleted meanwhile is another matter: an answer is as of when the gallery was read, or later.
        other.delete_subject(second, "after")
        assert await found(second) <= {"after"}
        assert await found(await context.gallery("g")) == set()

    async def main() -> None:
        app = create_app(served)
        async with app.router.lifespan_context(app):
            await search(app.state.context)

    asyncio.run(main())
    other.close()
