"""Response documents that are built by hand match their models in kith/wire."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import numpy as np
import orjson
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


def test_each_document_fits_its_model(
    server: str, kith: Kith, gallery: str, astronaut: Photo, group: Photo, nobody: Photo
) -> None:
    home, people = f"{server}/v1/galleries/{gallery}", (jpeg(group), jpeg(nobody), b"no photo")
    for route in ("detect", "embed"):
        seen, none, bad = fits(FacesOut, post(f"{server}/v1/{route}", *people))["images"]
        assert len(seen["faces"]) == 6
        assert ("embedding" in seen["faces"][0]) == (route == "embed")
        assert (none["faces"], bad["error"]["code"]) == ([], "image_format")
    empty = fits(IdentifyOut, post(f"{home}/identify", jpeg(astronaut)))
    assert empty["results"][0]["outcome"] == "unknown"
    kith.put_subject(gallery, "eileen", name="Eileen Collins")
    enrolled = fits(EnrollOut, post(f"{home}/subjects/eileen/templates", jpeg(astronaut), jpeg(group), b"no photo"))
    assert enrolled["enrolled_count"] == 1
    errors = [result.get("error", {}).get("code") for result in enrolled["results"]]
    assert errors == [None, "several_faces", "image_format"]
    vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
    photos = (jpeg(astronaut), *people, jpeg((astronaut * 0.12).astype(np.uint8)))
    found = fits(IdentifyOut, post(f"{home}/identify", *photos, embeddings=[vector], risk={"fpir": 0.001}))["results"]
    outcomes = {result["outcome"] for result in found}
    assert outcomes == {"identified", "unknown", "no_face", "rejected_quality", "error"}
    assert (found[0]["name"], found[-1]["embedding"]) == ("Eileen Collins", 0)

    def verified(*photos: bytes, **options: Any) -> dict[str, Any]:
        files = {side: ("photo", photo) for side, photo in zip("ab", photos, strict=False)}
        data = {"request": orjson.dumps(options).decode()}
        return fits(VerifyOut, httpx.post(f"{server}/v1/verify", files=files, data=data))

    assert verified(jpeg(astronaut), jpeg(astronaut))["outcome"] == "same"
    subject = {"subject": {"gallery": gallery, "subject": "eileen"}}
    one = verified(jpeg(astronaut), b=subject, risk={"threshold": 0.5})
    assert (one["b"], one["risk"]["source"]) == ({}, "explicit")
    none = verified(jpeg(astronaut), jpeg(nobody))
    assert (none["outcome"], none["reasons"], "similarity" in none) == ("no_face", ["b: no_face"], False)


def test_an_encoded_embedding_decodes_to_the_same_float32(
    kith: Kith, recognizer: Recognizer, rng: np.random.Generator
) -> None:
    """The encoding uses fewer digits than a double has."""
    vector = rng.normal(size=recognizer.dimension).astype(np.float32)
    written = responses.encode_json({"embedding": vector})
    assert np.array_equal(np.array(orjson.loads(written)["embedding"], np.float32), vector)
    assert len(written) < len(orjson.dumps({"embedding": [float(v) for v in vector]}))
