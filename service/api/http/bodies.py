"""Request bodies: JSON with base64 photos, multipart forms with photo files, or one photo as the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from fastapi import Depends, Request
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header
from pydantic import BaseModel, ValidationError

from kith.wire.fields import MAX_FILTER_TAGS
from kith.wire.photos import MAX_EMBEDDINGS, MAX_PHOTOS, Photos, Probes
from kith.wire.risk import RiskIn
from kith.wire.verification import SideIn, VerifyIn
from service.api.http.access import BackendDep
from service.api.http.content_encoding import content_coding
from service.api.http.deadlines import deadline, timeout_s
from service.api.http.gate import DEFAULT_BODY_BYTES
from service.api.http.problems import validation_error
from service.core.errors import InvalidRequestError, RequestTooLargeError, UnsupportedMediaTypeError
from service.core.json_limits import DEFAULT_LIMITS, JsonLimits, check_json
from service.core.photo_errors import ImageTooLargeError
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
    """Read a request that takes any number of photos.

    Args:
        request: the request.
        model: model of the body.
        settings: limits.
        dimension: length of each embedding that the body may contain.

    Raises:
        InvalidRequestError: the body does not fit the model, or has too many photos or embeddings.
        UnsupportedMediaTypeError: the content type is not supported.
        ImageTooLargeError: a photo is too large. A bare photo is not read beyond the limit.
    """
    set_body_limit(request, settings.max_request_bytes(settings.max_images))
    kind = media_type(request)
    bare = kind.startswith("image/") or kind == "application/octet-stream"
    limits = JsonLimits(numbers=MAX_EMBEDDINGS * dimension, lists=MAX_EMBEDDINGS)
    if kind == "application/json":
        body = await read_json(request, model, limits)
    elif kind == "multipart/form-data":
        options, plain, files = await _read_form(request, settings)
        unknown = {name for name, _ in files} - {"images", "image"}
        if unknown:
            raise InvalidRequestError(f"unknown file field {sorted(unknown)[0]!r}: name the photos 'images'")
        body = await _parse_in_thread_if_large(
            len(options),
            lambda: _validate_options(
                model, _add_plain(form_options(model), model, plain, _parse_object(options, limits=limits))
            ),
        )
        body = body.model_copy(update={"images": [payload for _, payload in files]})
    elif bare:
        body = _validate_options(model, _add_plain(plain_options(model), model, request.query_params.multi_items(), {}))
        body = body.model_copy(update={"images": [await _read_photo(request, settings.max_image_bytes)]})
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


async def read_verify(request: Request, settings: Settings, dimension: int = 0) -> VerifyIn:
    """Read a verification: JSON, or a form whose files are named ``a`` and ``b``.

    ``dimension``: length of each embedding that the body may contain. Raises as :func:`read_photos`.
    """
    set_body_limit(request, settings.max_request_bytes(VERIFY_SIDES))
    kind = media_type(request)
    limits = JsonLimits(numbers=VERIFY_SIDES * dimension)
    if kind == "application/json":
        return await read_json(request, VerifyIn, limits)
    if kind != "multipart/form-data":
        raise unsupported(kind)
    options, plain, files = await _read_form(request, settings)
    sides = dict(files)
    if len(sides) != len(files) or not sides.keys() <= {"a", "b"}:
        raise InvalidRequestError("name the files of a verification 'a' and 'b', and send each once")

    def parse() -> VerifyIn:
        document = _add_plain(form_options(VerifyIn), VerifyIn, plain, _parse_object(options, limits=limits))
        for name in sides:
            _set(document, name, {"image": ""})  # passes validation, and is replaced by the file
        return _validate(VerifyIn, document)

    body = await _parse_in_thread_if_large(len(options), parse)
    return body.model_copy(update={name: SideIn.model_construct({"image"}, image=sides[name]) for name in sides})


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
        """Raises InvalidRequestError, UnsupportedMediaTypeError, UnsupportedEncodingError."""
        set_body_limit(request, DEFAULT_BODY_BYTES)
        require_json(request)
        return await read_json(request, self.model)

    async def read_photos(self, request: Request, backend: BackendDep) -> AsyncIterator[Any]:
        """Yield the body. The time of the request counts from then on. Raises as :func:`read_photos`."""
        check_parameters(request)
        settings, seconds = backend.settings, timeout_s(request, backend.settings.deadline_s)
        dimension = backend.faces.recognizers.largest_dimension
        with backend.operations.metrics.stage("read"):
            if self.is_verification:
                body: Any = await read_verify(request, settings, dimension)
            else:
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


def set_body_limit(request: Request, size: int, streamed: bool = False, codings: tuple[str, ...] = ()) -> None:
    """Set the limit of a body that the gate enforces while it is read.

    Args:
        request: the request.
        size: in bytes.
        streamed: the body goes to disk or the database in pieces, and does not count as held in memory.
        codings: content codings that the caller decodes.

    Raises:
        UnsupportedEncodingError: the body has another content coding.
        RequestTooLargeError: its declared length exceeds the limit.
    """
    content_coding(request.headers, codings)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > size):
        raise RequestTooLargeError(f"{declared[:20]} bytes, the limit is {size}")
    request.scope.update(body_limit=size, body_streamed=streamed)


def check_parameters(request: Request) -> None:
    """Check the parameters of a handler, which FastAPI would do after its body. Raises RequestValidationError."""
    route: APIRoute = request.scope["route"]
    _, in_path = request_params_to_args(route.dependant.path_params, request.path_params)
    _, in_query = request_params_to_args(route.dependant.query_params, request.query_params)
    if errors := in_path + in_query:
        raise RequestValidationError(errors)


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported(kind: str, remedy: str = "") -> UnsupportedMediaTypeError:
    found = f"the header Content-Type is {kind!r}" if kind else "the header Content-Type is missing"
    return UnsupportedMediaTypeError(f"{found}{remedy}")


def require_json(request: Request) -> None:
    """Check the content type of a JSON body, if there is one. Raises UnsupportedMediaTypeError."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    kind = media_type(request)
    if has_body and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise unsupported(kind, "; send application/json")


async def _read_photo(request: Request, max_bytes: int) -> bytes:
    received, chunks = 0, list[bytes]()
    async for chunk in request.stream():
        received += len(chunk)
        if received > max_bytes:
            raise ImageTooLargeError(f"the photo has more than {max_bytes} bytes, the limit")
        chunks.append(chunk)
    return b"".join(chunks)


async def _read_form(
    request: Request, settings: Settings
) -> tuple[str, list[tuple[str, str]], list[tuple[str, bytes]]]:
    """Return the options as JSON, the plain options as (name, text), and the files as (name, content)."""
    options: str | None = None
    plain: list[tuple[str, str]] = []
    files: list[tuple[str, bytes]] = []
    for part in await read_parts(request, settings.max_images + 1, settings.max_image_bytes):
        if part.name == OPTIONS_FIELD:
            if len(part.payload) > MAX_FORM_FIELD_BYTES:  # possible if it was sent as a file
                raise InvalidRequestError(f"request: has more than {MAX_FORM_FIELD_BYTES} bytes")
            if options is not None:
                raise InvalidRequestError("request: may be sent once in a form")
            options = _decode(part)
        elif part.is_file:
            files.append((part.name, part.payload))
        elif part.name in PHOTO_FIELDS:
            raise InvalidRequestError(f"form field {part.name!r} has no file name: send the photo as a file, not text")
        else:
            plain.append((part.name, _decode(part)))
    return "{}" if options is None else options, plain, files


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


def _decode(field: FormPart) -> str:
    try:
        return field.payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{field.name}: is not UTF-8") from error


def _parse_object(text: str, name: str = OPTIONS_FIELD, limits: JsonLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    try:
        check_json(text.encode(), limits)
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{name}: must be a JSON object")
    return document


def _validate_options(model: type[Body], options: dict[str, Any]) -> Body:
    if "images" in options:
        raise InvalidRequestError("request: 'images' is allowed in a JSON body only; send photos as the body or files")
    return _validate(model, options)


def _validate(model: type[Body], document: dict[str, Any]) -> Body:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise validation_error(error.errors(include_input=False, include_url=False)) from error


@dataclass(frozen=True)
class FormPart:
    name: str
    is_file: bool
    payload: bytes


async def read_parts(request: Request, max_files: int, max_file_bytes: int) -> list[FormPart]:
    """Read the parts of a multipart body, in order, into memory.

    A file above ``max_file_bytes`` is cut after one more byte, so that its decoder reports it as too large.

    Raises InvalidRequestError.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    parts: list[FormPart] = []
    segment: MultipartSegment | None = None
    chunks: list[bytes] = []
    size = 0
    max_fields = MAX_FORM_FIELDS + max_files  # each photo may be a URL
    remaining = {True: max_files, False: max_fields}
    try:
        with PushMultipartParser(options.get("boundary", "")) as parser:
            async for body_chunk in request.stream():
                # The stream ends with an empty chunk, which would end the form early.
                for event in parser.parse(body_chunk) if body_chunk else ():
                    if isinstance(event, MultipartSegment):
                        segment, chunks, size = event, [], 0
                        remaining[_is_file(event)] -= 1
                        if min(remaining.values()) < 0:
                            raise InvalidRequestError(
                                f"the form has more than {max_files} files or {max_fields} fields"
                            )
                    elif segment is not None and event is not None:
                        chunk = bytes(event[: max_file_bytes + 1 - size])
                        size += len(chunk)
                        if chunk:
                            chunks.append(chunk)
                        if not _is_file(segment) and segment.bytes_received > MAX_FORM_FIELD_BYTES:
                            raise InvalidRequestError(f"a form field has more than {MAX_FORM_FIELD_BYTES} bytes")
                    elif segment is not None:
                        parts.append(FormPart(segment.name or "", _is_file(segment), b"".join(chunks)))
                        chunks = []
    except MultipartError as error:
        if isinstance(error.__context__, UnicodeDecodeError):
            raise InvalidRequestError("the form cannot be read: a name or file name is not UTF-8") from error
        raise InvalidRequestError(f"the form cannot be read: {error.args[0]}") from error
    return parts


def _is_file(segment: MultipartSegment) -> bool:
    return segment.filename is not None


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
