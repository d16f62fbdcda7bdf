"""Request bodies: JSON with base64 photos, multipart forms with photo files, or one photo as the body."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from fastapi import Depends, Request
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from kith.wire.fields import MAX_FILTER_TAGS
from kith.wire.photos import MAX_EMBEDDINGS, MAX_PHOTOS, Photos, Probes
from kith.wire.risk import RiskIn
from kith.wire.verification import SideIn, VerifyIn
from service.api.http.access import BackendDep
from service.api.http.deadlines import deadline, timeout_s
from service.api.http.gate import DEFAULT_BODY_BYTES
from service.api.http.problems import validation_error
from service.core.errors import (
    ImageError,
    InvalidRequestError,
    LimitReachedError,
    RefusedError,
)
from service.core.json_limits import DEFAULT_LIMITS, JsonLimits, check_json
from service.settings import Settings

OPTIONS_FIELD: Final = "request"
"""Form field that holds the other fields as JSON."""
PLAIN_TYPES: Final = frozenset({"string", "integer", "number", "boolean"})
FILTER_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "tag": {
        "type": "array",
        "items": {"type": "string"},
        "maxItems": MAX_FILTER_TAGS,
        "description": "Search only subjects with all of these tags; repeatable.",
    },
    "metadata": {
        "type": "string",
        "description": "Search only subjects with all of these metadata: a JSON object.",
        "example": '{"floor": 3}',
    },
}
"""Plain forms of a filter, as of a list of subjects."""
URL_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "urls": {
        "type": "array",
        "items": {"type": "string"},
        "maxItems": MAX_PHOTOS,
        "description": "URL of a photo; repeatable.",
    }
}
PHOTO_FIELDS: Final = frozenset({"images", "image", "a", "b"})
"""Form fields of photos."""
VERIFY_SIDES: Final = 2
MAX_FORM_FIELDS: Final = 16
MAX_FORM_FIELD_BYTES: Final = 1_048_576
MAX_INLINE_PARSE_BYTES: Final = 65_536
"""Larger JSON is parsed in a worker thread."""

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


async def read_photos(request: Request, model: type[Body], settings: Settings, dimension: int = 0) -> Body:
    """Read photos as JSON with base64, as files of a form, or one photo as the body with its options in the query.

    The files of a verification are named ``a`` and ``b``; it has no bare photo.

    Args:
        request: the request.
        model: model of the body.
        settings: limits.
        dimension: length of each embedding that the body may contain.

    Raises:
        InvalidRequestError: the body does not fit the model, or has too many photos or embeddings.
        unsupported_media_type: the content type is not supported.
        image_too_large: a bare photo is too large. A photo among several fails alone, when it is decoded.
        request_too_large, unsupported_encoding: as :func:`set_body_limit`.
    """
    sides = model is VerifyIn
    set_body_limit(request, settings.max_request_bytes(VERIFY_SIDES if sides else settings.max_images))
    kind = media_type(request)
    lists = 0 if sides else MAX_EMBEDDINGS
    limits = JsonLimits(numbers=(lists or VERIFY_SIDES) * dimension, lists=lists)
    bare = not sides and (kind.startswith("image/") or kind == "application/octet-stream")
    if kind == "application/json":
        body = await read_json(request, model, limits)
    elif kind == "multipart/form-data":
        parts = await read_form(request, settings.max_images + 1)
        body = await _parse_in_thread_if_large(
            sum(len(part) for _, part in parts if isinstance(part, str)), lambda: _parse_form(parts, model, limits)
        )
    elif bare:
        document = _add_plain(plain_options(model), model, request.query_params.multi_items(), {})
        photo = await _read_photo(request, settings.max_image_bytes)
        body = _validate(model, document).model_copy(update={"images": [photo]})
    else:
        raise unsupported(kind)
    if not bare and request.query_params:
        raise InvalidRequestError("query parameters are for a photo as the body: send options as JSON or form fields")
    if isinstance(body, Photos) and len(body.photos) > settings.max_images:
        raise InvalidRequestError(f"{len(body.photos)} photos, the limit is {settings.max_images}")
    if isinstance(body, Probes):
        if not body.photos and not body.embeddings:
            raise InvalidRequestError("send at least one of images, urls or embeddings")
        if len(body.embeddings) > MAX_EMBEDDINGS:
            raise InvalidRequestError(f"{len(body.embeddings)} embeddings, the limit is {MAX_EMBEDDINGS}")
    return body


async def _read_photo(request: Request, max_bytes: int) -> bytes:
    received, chunks = 0, list[bytes]()
    async for chunk in request.stream():
        received += len(chunk)
        if received > max_bytes:
            raise ImageError("image_too_large", f"the photo has more than {max_bytes} bytes, the limit")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse_form(parts: Sequence[tuple[str, str | bytes]], model: type[Body], limits: JsonLimits) -> Body:
    """Return the body of a form's options and files. The field ``request`` has options as JSON."""
    options = [part for name, part in parts if name == OPTIONS_FIELD]
    plain = [(name, part) for name, part in parts if isinstance(part, str) and name != OPTIONS_FIELD]
    files = [(name, part) for name, part in parts if isinstance(part, bytes) and name != OPTIONS_FIELD]
    if len(options) > 1:
        raise InvalidRequestError("request: may be sent once in a form")
    document = _parse_object(options[0] if options else "{}", limits=limits)
    if "images" in document:
        raise InvalidRequestError("request: 'images' is allowed in a JSON body only; send photos as the body or files")
    if texts := PHOTO_FIELDS & {name for name, _ in plain}:
        raise InvalidRequestError(f"form field {min(texts)!r} has no file name: send the photo as a file, not text")
    _add_plain(form_options(model), model, plain, document)
    names = {name for name, _ in files}
    if model is not VerifyIn:
        if unknown := names - {"images", "image"}:
            raise InvalidRequestError(f"unknown file field {min(unknown)!r}: name the photos 'images'")
        return _validate(model, document).model_copy(update={"images": [photo for _, photo in files]})
    if len(names) < len(files) or not names <= {"a", "b"}:
        raise InvalidRequestError("name the files of a verification 'a' and 'b', and send each once")
    for name in names:
        _set(document, name, {"image": ""})  # passes validation, and is replaced by the file
    sides = {name: SideIn.model_construct({"image"}, image=photo) for name, photo in files}
    return _validate(model, document).model_copy(update=sides)


@dataclass(frozen=True)
class BodyOf:
    """Reader of a body, a dependency that runs after those before it: a rejected request's body is never read."""

    model: type[BaseModel]
    takes_photos: bool = False

    @property
    def is_verification(self) -> bool:
        return self.model is VerifyIn

    @property
    def query_names(self) -> set[str]:
        """Query parameters of a photo as the body."""
        return {*plain_options(self.model)} if self.takes_photos and not self.is_verification else set()

    async def read_json(self, request: Request) -> Any:
        """Raises InvalidRequestError, unsupported_media_type, unsupported_encoding."""
        set_body_limit(request, DEFAULT_BODY_BYTES)
        require_json(request)
        return await read_json(request, self.model)

    async def read_photos(self, request: Request, backend: BackendDep) -> AsyncIterator[Any]:
        """Yield the body. The time of the request counts from then on. Raises as :func:`read_photos`."""
        check_parameters(request)
        settings, seconds = backend.settings, timeout_s(request, backend.settings.deadline_s)
        dimension = backend.recognizers.largest_dimension
        with backend.metrics.stage("read"):
            body = await read_photos(request, self.model, settings, dimension)
        async with deadline(request, seconds):
            yield body


if TYPE_CHECKING:
    JsonBody = Annotated[Body, "JSON"]
    PhotosBody = Annotated[Body, "JSON, a form, or a photo"]
else:

    class JsonBody:
        """``JsonBody[Model]`` is a parameter of a handler: the JSON body."""

        def __class_getitem__(cls, model: type[BaseModel]) -> Any:
            return Annotated[model, Depends(BodyOf(model).read_json)]

    class PhotosBody:
        """``PhotosBody[Model]`` is a parameter of a handler: the body with photos."""

        def __class_getitem__(cls, model: type[BaseModel]) -> Any:
            return Annotated[model, Depends(BodyOf(model, takes_photos=True).read_photos, scope="function")]


def set_body_limit(request: Request, size: int, streamed: bool = False, codings: tuple[str, ...] = ()) -> str | None:
    """Set the limit of a body, which the gate enforces while it is read, and return its content coding.

    Args:
        request: the request.
        size: in bytes.
        streamed: the body goes to disk or the database in pieces, and does not count as held in memory.
        codings: content codings that the caller decodes.

    Raises:
        unsupported_encoding: the body has another content coding.
        request_too_large: its declared length exceeds the limit.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > size):
        raise LimitReachedError("request_too_large", f"{declared[:20]} bytes, the limit is {size}")
    request.scope.update(body_limit=size, body_streamed=streamed)
    return content_coding(request.headers, codings)


def content_coding(headers: Headers, accepted: tuple[str, ...] = ()) -> str | None:
    """Return the content coding of a body (RFC 9110, 8.4), None if it has none.

    Raises unsupported_encoding: it is none of ``accepted``, in lower case, or there are several.
    """
    named = ",".join(headers.getlist("content-encoding")).lower().split(",")
    codings = [coding.strip().removeprefix("x-") for coding in named if coding.strip() not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in accepted:
        supported = ", ".join((*accepted, "identity"))
        raise RefusedError(
            "unsupported_encoding",
            f"Content-Encoding: {', '.join(codings)[:80]!r}; this path supports: {supported}",
            headers={"Accept-Encoding": supported},  # RFC 9110, 15.5.16
        )
    return codings[0]


def check_parameters(request: Request) -> None:
    """Check the parameters of a handler, which FastAPI would do after its body. Raises RequestValidationError."""
    route: APIRoute = request.scope["route"]
    _, in_path = request_params_to_args(route.dependant.path_params, request.path_params)
    _, in_query = request_params_to_args(route.dependant.query_params, request.query_params)
    if errors := in_path + in_query:
        raise RequestValidationError(errors)


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported(kind: str, remedy: str = "") -> RefusedError:
    found = f"the header Content-Type is {kind!r}" if kind else "the header Content-Type is missing"
    return RefusedError("unsupported_media_type", f"{found}{remedy}")


def require_json(request: Request) -> None:
    """Check the content type of a JSON body, if there is one. Raises unsupported_media_type."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    kind = media_type(request)
    if has_body and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise unsupported(kind, "; send application/json")


@cache
def plain_options(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the options of a model that fit in a form field or a query parameter, with their JSON schemas.

    A risk has one option for each of its forms, such as ``fpir``, and a filter the options of a list of subjects.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in (model, RiskIn) if "risk" in model.model_fields else (model,):
        for name, schema in each.model_json_schema()["properties"].items():
            kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
            if len(kinds) == 1 and kinds[0].get("type") in PLAIN_TYPES:
                kept = {key: value for key, value in kinds[0].items() if key not in ("title", "default")}
                about = [schema["description"]] if "description" in schema else []
                about += [f"Default: {json.dumps(schema['default'])}."] if schema.get("default") is not None else []
                found[name] = kept | ({"description": " ".join(about)} if about else {})
    return found | (FILTER_OPTIONS if "filter" in model.model_fields else {})


def form_options(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the options that fit in a form field: :func:`plain_options`, and URLs, which should not be in a query."""
    return plain_options(model) | (URL_OPTIONS if "urls" in model.model_fields else {})


def _add_plain(
    known: Collection[str], model: type[BaseModel], plain: Iterable[tuple[str, str]], document: dict[str, Any]
) -> dict[str, Any]:
    """Add ``known`` plain options to the JSON document.

    Raises InvalidRequestError: an option is unknown, or may be sent once and is there.
    """
    for name, text in plain:
        if name not in known:
            raise InvalidRequestError(
                f"unknown option {name!r}. Known: {', '.join(sorted(known))}; all others go as JSON in the form field "
                f"{OPTIONS_FIELD!r}"
            )
        if name == "urls":
            _append(document, name, text)
        elif name == "tag":
            _append(document.setdefault("filter", {}), "tags", text)
        elif name == "metadata":
            _set(document.setdefault("filter", {}), name, _parse_object(text, name))
        else:
            _set(document if name in model.model_fields else document.setdefault("risk", {}), name, text)
    return document


def _set(place: Any, name: str, value: Any) -> None:
    if not isinstance(place, dict) or name in place:
        raise InvalidRequestError(f"{name}: may be sent once")
    place[name] = value


def _append(place: Any, name: str, text: str) -> None:
    listed = place.setdefault(name, []) if isinstance(place, dict) else None
    if not isinstance(listed, list):
        raise InvalidRequestError(f"{name}: must be a list")
    listed.append(text)


def _parse_object(text: str | bytes, name: str = OPTIONS_FIELD, limits: JsonLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    if len(text) > MAX_FORM_FIELD_BYTES:  # possible if it was sent as a file
        raise InvalidRequestError(f"{name}: has more than {MAX_FORM_FIELD_BYTES} bytes")
    try:
        check_json(text.encode() if isinstance(text, str) else text, limits)
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{name}: must be a JSON object")
    return document


def _validate(model: type[Body], document: dict[str, Any]) -> Body:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise validation_error(error.errors(include_input=False, include_url=False)) from error


class _FormInMemory(MultiPartParser):
    """Parser that keeps files in memory, since photos of people must not reach the disk, and takes UTF-8 only."""

    spool_max_size = sys.maxsize
    is_complete = False

    def on_headers_finished(self) -> None:
        _check_utf8(self._current_part.content_disposition or b"", "a name or file name")
        super().on_headers_finished()

    def on_part_end(self) -> None:
        _check_utf8(self._current_part.data, "a field")
        super().on_part_end()

    def on_end(self) -> None:
        self.is_complete = True


def _check_utf8(data: bytes | bytearray, what: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise MultiPartException(f"{what} is not UTF-8") from error


async def read_form(request: Request, max_files: int) -> list[tuple[str, str | bytes]]:
    """Read the parts of a form into memory, in order: the text of a field, the content of a file.

    Raises InvalidRequestError.
    """
    max_fields = MAX_FORM_FIELDS + max_files  # each photo may be a URL
    parser = _FormInMemory(request.headers, request.stream(), max_files=max_files, max_fields=max_fields)
    try:
        parts = (await parser.parse()).multi_items()
    except MultiPartException as error:
        raise InvalidRequestError(f"the form cannot be read: {error.message}") from error
    found = list[tuple[str, str | bytes]]()
    for name, part in parts:
        found.append((name, part if isinstance(part, str) else part.file.read()))
        if not isinstance(part, str):
            part.file.close()  # frees the parser's copy
    if not parser.is_complete:
        raise InvalidRequestError("the form cannot be read: it ends early")
    return found


async def read_json(request: Request, model: type[Body], limits: JsonLimits = DEFAULT_LIMITS) -> Body:
    """Read a JSON body.

    Raises:
        InvalidRequestError: the body is not JSON of the model, or has more values than ``limits`` allows.
    """
    chunks = [chunk async for chunk in request.stream()]
    body = b"".join(chunks)
    chunks.clear()
    if not body:
        raise InvalidRequestError("body: Field required")

    def parse() -> Body:
        _check_limits(body, limits)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise validation_error(error.errors(include_input=False, include_url=False)) from error

    return await _parse_in_thread_if_large(len(body), parse)


async def _parse_in_thread_if_large(size: int, parse: Callable[[], Result]) -> Result:
    return parse() if size <= MAX_INLINE_PARSE_BYTES else await asyncio.to_thread(parse)


def _check_limits(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> None:
    try:
        check_json(body, limits)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON has {error}") from error
