"""Request bodies: JSON with photos in base64, or multipart with photos as files. Both end as the same model."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.api.problems import validation_error
from service.api.schemas import Photos, Probes, Side, VerifyIn
from service.errors import InvalidRequestError, UnsupportedMediaTypeError
from service.settings import Settings

Body = TypeVar("Body", bound=BaseModel)


async def read_photos(request: Request, model: type[Body], settings: Settings) -> Body:
    """Read a request whose photos are ``images``.

    Raises:
        InvalidRequestError, UnsupportedMediaTypeError.
    """
    if _is_json(request):
        body = _validated_json(model, await request.body())
    else:
        document, files = await _read_form(request, settings)
        wrong = {name for name, _ in files} - {"images", "image"}
        if wrong:
            raise InvalidRequestError(f"unknown file part {sorted(wrong)[0]!r}: photos come in parts named 'images'")
        body = _validated(model, document).model_copy(update={"images": [payload for _, payload in files]})
    if isinstance(body, Photos) and len(body.images) > settings.max_images:
        raise InvalidRequestError(f"{len(body.images)} photos, the limit is {settings.max_images}")
    if isinstance(body, Probes):
        if not body.images and not body.embeddings:
            raise InvalidRequestError("images, embeddings: at least one is needed")
        if len(body.embeddings) > settings.max_embeddings:
            raise InvalidRequestError(f"{len(body.embeddings)} embeddings, the limit is {settings.max_embeddings}")
    return body


async def read_verify(request: Request, settings: Settings) -> VerifyIn:
    """Read a verification, whose two sides are photos ``a`` and ``b``, or anything else in JSON."""
    if _is_json(request):
        return _validated_json(VerifyIn, await request.body())
    document, files = await _read_form(request, settings)
    sides = dict(files)
    if len(sides) != len(files) or not sides.keys() <= {"a", "b"}:
        raise InvalidRequestError("file parts of a verification are named 'a' and 'b', once each")
    # Stands in for the file until the rest is validated: base64 of nothing.
    body = _validated(VerifyIn, {name: {"image": ""} for name in sides} | document)
    return body.model_copy(update={name: Side.model_construct({"image"}, image=sides[name]) for name in sides})


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return True
    if kind == "multipart/form-data":
        return False
    raise UnsupportedMediaTypeError(f"content type {kind or 'none'!r}")


async def _read_form(request: Request, settings: Settings) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The JSON of part ``request``, and every file part as (name, content)."""
    document: dict[str, Any] = {}
    files: list[tuple[str, bytes]] = []
    try:
        async with request.form(max_files=settings.max_images + 1, max_fields=4) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    payload = await value.read()
                    if name == "request":
                        document = _json_object(payload.decode("utf-8", "replace"))
                    else:
                        files.append((name, payload))
                elif name == "request":
                    document = _json_object(value)
                else:
                    raise InvalidRequestError(f"unknown form field {name!r}: options stand as JSON in a part 'request'")
    except HTTPException as error:
        raise InvalidRequestError(f"the form cannot be read: {error.detail}") from error
    return document, files


def _json_object(text: str) -> dict[str, Any]:
    try:
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
        raise validation_error(error.errors()) from error


def _validated_json(model: type[Body], body: bytes) -> Body:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error.errors()) from error
