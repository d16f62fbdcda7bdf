"""Request bodies: JSON with photos in base64, multipart with photos as files, or one photo as it is. All end as the
same model."""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.api.forms import MOST_FIELD_BYTES, read_parts
from service.api.json_bodies import away_if_large, read_json
from service.api.problems import validation_error
from service.api.schemas import Photos, Probes, Side, VerifyIn
from service.errors import ImageTooLargeError, InvalidRequestError, UnsupportedMediaTypeError
from service.json_limits import check_json
from service.settings import Settings

OPTIONS: Final = "request"
"""The form's part, or with a bare photo the query's parameter, that holds the other fields as JSON."""
SIDES: Final = 2
"""Photos or embeddings of a verification."""

Body = TypeVar("Body", bound=BaseModel)


async def read_photos(request: Request, model: type[Body], settings: Settings, dimension: int = 0) -> Body:
    """Read a request whose photos are ``images``. ``dimension``: of the embeddings that it may have.

    Raises:
        InvalidRequestError, UnsupportedMediaTypeError.
        ImageTooLargeError: a bare photo has more bytes than a photo may; what is too many is not read.
    """
    kind = _media_type(request)
    if kind == "application/json":
        numbers = settings.max_embeddings * dimension
        body = await read_json(request, model, settings.max_images, settings.max_image_bytes, numbers)
    elif kind == "multipart/form-data":
        options, files = await _read_form(request, settings)
        wrong = {name for name, _ in files} - {"images", "image"}
        if wrong:
            raise InvalidRequestError(f"unknown file part {sorted(wrong)[0]!r}: photos come in parts named 'images'")
        body = await away_if_large(len(options), lambda: _validated(model, _without_photos(_json_object(options))))
        body = body.model_copy(update={"images": [payload for _, payload in files]})
    elif kind.startswith("image/") or kind == "application/octet-stream":
        body = _validated(model, _without_photos(_options(request)))
        body = body.model_copy(update={"images": [await _read_photo(request, settings.max_image_bytes)]})
    else:
        raise _not_understood(kind)
    if isinstance(body, Photos) and len(body.photos) > settings.max_images:
        raise InvalidRequestError(f"{len(body.photos)} photos, the limit is {settings.max_images}")
    if isinstance(body, Probes):
        if not body.photos and not body.embeddings:
            raise InvalidRequestError("images, urls, embeddings: at least one is needed")
        if len(body.embeddings) > settings.max_embeddings:
            raise InvalidRequestError(f"{len(body.embeddings)} embeddings, the limit is {settings.max_embeddings}")
    return body


async def read_verify(request: Request, settings: Settings, dimension: int = 0) -> VerifyIn:
    """Read a verification, whose two sides are photos ``a`` and ``b``, or anything else in JSON. ``dimension``: of the
    embeddings that it may have."""
    kind = _media_type(request)
    if kind == "application/json":
        return await read_json(request, VerifyIn, SIDES, settings.max_image_bytes, SIDES * dimension)
    if kind != "multipart/form-data":
        raise _not_understood(kind)
    options, files = await _read_form(request, settings)
    sides = dict(files)
    if len(sides) != len(files) or not sides.keys() <= {"a", "b"}:
        raise InvalidRequestError("file parts of a verification are named 'a' and 'b', once each")
    # Stands in for the file until the rest is validated: base64 of nothing.
    beside: dict[str, Any] = {name: {"image": ""} for name in sides}
    body = await away_if_large(len(options), lambda: _validated(VerifyIn, beside | _json_object(options)))
    return body.model_copy(update={name: Side.model_construct({"image"}, image=sides[name]) for name in sides})


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _not_understood(kind: str) -> UnsupportedMediaTypeError:
    return UnsupportedMediaTypeError(f"content type {kind or 'none'!r}")


def _options(request: Request) -> dict[str, Any]:
    """The JSON of the query's parameter."""
    unknown = request.query_params.keys() - {OPTIONS}
    if unknown:
        raise InvalidRequestError(
            f"unknown query parameter {sorted(unknown)[0]!r}: with a bare photo options stand as JSON in {OPTIONS!r}"
        )
    return _json_object(request.query_params.get(OPTIONS, "{}"))


async def _read_photo(request: Request, limit: int) -> bytes:
    received, pieces = 0, list[bytes]()
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise ImageTooLargeError(f"the photo has more than {limit} bytes, the limit")
        pieces.append(chunk)
    return b"".join(pieces)


async def _read_form(request: Request, settings: Settings) -> tuple[str, list[tuple[str, bytes]]]:
    """The JSON of part ``request``, and every file part as (name, content)."""
    options: str | None = None
    files: list[tuple[str, bytes]] = []
    for part in await read_parts(request, settings.max_images + 1, settings.max_image_bytes):
        if part.name == OPTIONS:
            if len(part.payload) > MOST_FIELD_BYTES:  # sent as a file
                raise InvalidRequestError(f"request: has more than {MOST_FIELD_BYTES} bytes")
            if options is not None:
                raise InvalidRequestError("request: stands once in a form")
            options = part.payload.decode("utf-8", "replace")
        elif part.is_file:
            files.append((part.name, part.payload))
        else:
            raise InvalidRequestError(f"unknown form field {part.name!r}: options stand as JSON in a part {OPTIONS!r}")
    return "{}" if options is None else options, files


def _without_photos(options: dict[str, Any]) -> dict[str, Any]:
    if "images" in options:
        raise InvalidRequestError("request: 'images' stand in JSON alone: here the photos are the body, or its files")
    return options


def _json_object(text: str) -> dict[str, Any]:
    try:
        check_json(text.encode())
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"request: is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise InvalidRequestError("request: must be a JSON object")
    return document


def _validated(model: type[Body], document: dict[str, Any]) -> Body:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise validation_error(error.errors(include_input=False, include_url=False)) from error
