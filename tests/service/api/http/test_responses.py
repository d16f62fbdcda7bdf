"""Response documents that are built by hand match their models in kith/wire."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel

from kith import Kith
from kith.wire.faces import FacesOut
from kith.wire.identification import IdentifyOut
from kith.wire.subjects import EnrollOut
from kith.wire.verification import VerifyOut
from models.vision.recognition import Recognizer
from service.usecases import documents as responses
from tests.conftest import jpeg

Photo = NDArray[np.uint8]


def fits(model: type[BaseModel], response: httpx.Response) -> dict[str, Any]:
    """Return the document after checking that it equals its model without nulls."""
    assert response.is_success, response.text
    document: dict[str, Any] = response.json()
    assert model.model_validate_json(response.content, strict=True).model_dump(exclude_none=True) == document
    return document


def post(url: str, *photos: bytes, **options: Any) -> httpx.Response:
    files = [("images", ("photo", photo)) for photo in photos]
    return httpx.post(url, files=files, data={"request": orjson.dumps(options).decode()})


@pytest.mark.parametrize("route", ["detect", "embed"])
def test_faces(server: str, group: Photo, nobody: Photo, route: str) -> None:
    document = fits(FacesOut, post(f"{server}/v1/{route}", jpeg(group), jpeg(nobody), b"no photo"))
    seen, none, bad = document["images"]
    assert len(seen["faces"]) == 6
    assert ("embedding" in seen["faces"][0]) == (route == "embed")
    assert (none["faces"], bad["error"]["code"]) == ([], "image_format")


def test_verify(server: str, kith: Kith, gallery: str, astronaut: Photo, nobody: Photo) -> None:
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    url, photo = f"{server}/v1/verify", ("photo", jpeg(astronaut))
    subject = {"subject": {"gallery": gallery, "subject": "eileen"}}
    both = fits(VerifyOut, httpx.post(url, files=[("a", photo), ("b", photo)]))
    assert both["outcome"] == "same"
    options = {"b": subject, "risk": {"threshold": 0.5}}
    one = fits(VerifyOut, httpx.post(url, files=[("a", photo)], data={"request": orjson.dumps(options).decode()}))
    assert (one["b"], one["risk"]["source"]) == ({}, "explicit")
    none = fits(VerifyOut, httpx.post(url, files=[("a", photo), ("b", ("photo", jpeg(nobody)))]))
    assert (none["outcome"], none["reasons"]) == ("no_face", ["b: no_face"])
    assert "similarity" not in none


def test_identify(server: str, kith: Kith, gallery: str, astronaut: Photo, group: Photo, nobody: Photo) -> None:
    url = f"{server}/v1/galleries/{gallery}/identify"
    empty = fits(IdentifyOut, post(url, jpeg(astronaut)))
    assert empty["results"][0]["outcome"] == "unknown"
    kith.put_subject(gallery, "eileen", name="Eileen Collins")
    kith.enroll(gallery, "eileen", jpeg(astronaut))
    dark = jpeg((astronaut * 0.12).astype(np.uint8))
    vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
    photos = (jpeg(astronaut), jpeg(group), jpeg(nobody), dark, b"no photo")
    document = fits(IdentifyOut, post(url, *photos, embeddings=[np.asarray(vector).tolist()], risk={"fpir": 0.001}))
    outcomes = {result["outcome"] for result in document["results"]}
    assert outcomes == {"identified", "unknown", "no_face", "rejected_quality", "error"}
    assert document["results"][0]["name"] == "Eileen Collins"
    assert document["results"][-1]["embedding"] == 0


def test_enroll(server: str, kith: Kith, gallery: str, astronaut: Photo, group: Photo) -> None:
    url = f"{server}/v1/galleries/{gallery}/subjects/eileen/templates"
    document = fits(EnrollOut, post(url, jpeg(astronaut), jpeg(group), b"no photo"))
    assert document["enrolled_count"] == 1
    assert [result.get("error", {}).get("code") for result in document["results"]] == [
        None,
        "several_faces",
        "image_format",
    ]


def test_an_encoded_embedding_decodes_to_the_same_float32(
    kith: Kith, recognizer: Recognizer, rng: np.random.Generator
) -> None:
    """The encoding uses fewer digits than a double has."""
    vector = rng.normal(size=recognizer.dimension).astype(np.float32)
    written = responses.encode_json({"embedding": vector})
    assert np.array_equal(np.array(orjson.loads(written)["embedding"], np.float32), vector)
    assert len(written) < len(orjson.dumps({"embedding": [float(v) for v in vector]}))
