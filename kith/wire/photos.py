"""Photos and embeddings in requests, with base64 decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

from pydantic import (
    Base64Bytes,
    Field,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from kith.wire.base64_text import decode_base64, unescape
from kith.wire.common import Detail
from kith.wire.fields import DETAIL, MAX_URL_LENGTH, Embedding, Fingerprint, RequestModel

MAX_PHOTOS: Final = 1000
"""Upper bound of KITH_MAX_IMAGES, which limits requests further."""
MAX_EMBEDDINGS: Final = 16
"""Maximum number of embeddings per request."""


class LongStrings(dict[str, bytearray]):
    """Long strings of a JSON body, kept outside of the document, by the placeholder that replaces each."""


def _decode_photo(value: Any, decode: ValidatorFunctionWrapHandler, info: ValidationInfo) -> bytes:
    """Decode base64. The photo is removed from the LongStrings in ``info.context`` to free its memory early."""
    if not isinstance(value, str):
        return cast(bytes, decode(value))
    text: bytes | bytearray | None = info.context.pop(value, None) if isinstance(info.context, LongStrings) else None
    try:
        if text is not None and b"\\" in text:  # some JSON encoders write / as \/, and line breaks are \n
            text = unescape(text)
        return decode_base64(value.encode("utf-8", "replace") if text is None else text)
    except ValueError as error:
        raise PydanticCustomError("photo_base64", "{reason}", {"reason": str(error)}) from error


PhotoBytes = Annotated[Base64Bytes, WrapValidator(_decode_photo)]
PhotoUrl = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH)]


class Photos(RequestModel):
    """``images`` in base64, or as data URLs. In multipart requests the photos are file parts named ``images``, and a
    part named ``request`` has the other fields as JSON."""

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

    embeddings: list[Embedding] = Field(
        default_factory=list, fail_fast=True, json_schema_extra={"maxItems": MAX_EMBEDDINGS}
    )
    recognizer: Fingerprint | None = Field(
        None,
        description="Recognizer of the embeddings, as /v1/embed reports it. It must match the gallery's. It is "
        "required if the gallery has, or ever had, vectors of two recognizers.",
    )
