"""Photos and embeddings in requests, with base64 decoding."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import (
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from kith.wire.common import Detail
from kith.wire.fields import DETAIL, MAX_URL_LENGTH, Embedding, Fingerprint, RequestModel

MAX_PHOTOS: Final = 1000
"""Upper bound of KITH_MAX_IMAGES, which limits requests further."""
MAX_EMBEDDINGS: Final = 16
"""Maximum number of embeddings per request."""


def _decode_photo(value: Any, decode: ValidatorFunctionWrapHandler) -> bytes:
    """Decode base64, of the standard or the URL-safe alphabet (RFC 4648), with or without padding and line breaks.

    A data URL (RFC 2397), such as ``data:image/jpeg;base64,...``, is accepted, too.
    """
    if isinstance(value, str):
        start = value[:8].lower()
        if start.startswith(("http://", "https://")):
            raise ValueError("the photo is a URL: send it in 'urls', or send the content of the photo in base64")
        if start.startswith("data:"):
            value = value.rpartition(",")[2]  # its media type may have commas, base64 has none
        if "\n" in value or "\r" in value:
            value = "".join(value.split())
    try:
        photo: bytes = decode(value)
    except ValidationError:
        raise ValueError(
            "the photo is not base64: it has other characters or spaces, or ends early. Encode the file again, and "
            "escape '+' as %2B where it passes a form"
        ) from None
    return photo


PhotoBytes = Annotated[
    bytes, WrapValidator(_decode_photo), WithJsonSchema({"type": "string", "format": "base64"}, mode="validation")
]
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
