"""Photos and embeddings in requests, with base64 decoding."""

from __future__ import annotations

import binascii
import json
from typing import Annotated, Any, Final, cast

from pydantic import (
    Base64Bytes,
    Field,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from models.vision.face_search import Detail
from service.schemas.fields import DETAIL, Embedding, Fingerprint, RequestModel

MAX_PHOTOS: Final = 1000
"""Upper bound of KITH_MAX_IMAGES, which limits requests further."""
MAX_EMBEDDINGS: Final = 100_000
"""Upper bound of KITH_MAX_EMBEDDINGS, which limits requests further."""
DECODE_CHUNK_BYTES: Final = 1 << 20
"""Base64 characters per call: decoding holds the GIL, and other threads wait."""


class LongStrings(dict[str, bytearray]):
    """Long strings of a JSON body, kept outside of the document, by the placeholder that replaces each."""


def _decode_photo(value: Any, decode: ValidatorFunctionWrapHandler, info: ValidationInfo) -> bytes:
    """Decode base64. The photo is removed from the LongStrings in ``info.context`` to free its memory early."""
    if not (isinstance(info.context, LongStrings) and value in info.context):
        return cast(bytes, decode(value))
    text = info.context.pop(value)
    if b"\\" in text:  # some JSON encoders write / as \/
        return cast(bytes, decode(json.loads(b'"' + text + b'"')))
    try:
        if 0 <= text.find(b"=") < len(text) - 2:
            raise ValueError("padding before the end")
        photo = bytearray()
        for start in range(0, len(text), DECODE_CHUNK_BYTES):
            photo += binascii.a2b_base64(text[start : start + DECODE_CHUNK_BYTES], strict_mode=True)
        return bytes(photo)
    except ValueError:  # line breaks, or other characters that the lenient decoder skips
        return cast(bytes, decode(text.decode("utf-8", "replace")))


PhotoBytes = Annotated[Base64Bytes, WrapValidator(_decode_photo)]
PhotoUrl = Annotated[str, StringConstraints(min_length=1, max_length=2048)]


class Photos(RequestModel):
    """``images`` in base64. In multipart requests the photos are file parts named ``images``, and a part named
    ``request`` has the other fields as JSON."""

    images: list[PhotoBytes] = Field(default_factory=list, max_length=MAX_PHOTOS, fail_fast=True)
    urls: list[PhotoUrl] = Field(
        default_factory=list,
        max_length=MAX_PHOTOS,
        fail_fast=True,
        description="URLs of photos on hosts in KITH_URL_HOSTS. They are numbered after the images.",
    )

    detail: Detail | None = Field(
        None, description=f"{DETAIL} Default: KITH_DETAIL; for an enrollment, at least medium."
    )

    @property
    def photos(self) -> list[bytes | str]:
        """All photos in order, as bytes or URLs."""
        return [*self.images, *self.urls]


class Probes(Photos):
    """Photos, embeddings, or both."""

    embeddings: list[Embedding] = Field(default_factory=list, max_length=MAX_EMBEDDINGS, fail_fast=True)
    recognizer: Fingerprint | None = Field(
        None,
        description="Recognizer of the embeddings, as /v1/embed reports it. It must match the gallery's. It is "
        "required if the gallery has, or ever had, vectors of two recognizers.",
    )
