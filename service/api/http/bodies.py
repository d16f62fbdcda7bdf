"""Request bodies: JSON with base64 photos, multipart forms with photo files, or one photo as the body."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError
from starlette.formparsers import MultiPartException, MultiPartParser

from kith.wire.identification import FilterIn
from kith.wire.photos import MAX_EMBEDDINGS, Photos, Probes
from kith.wire.risk import RiskIn
from kith.wire.verification import VerifyIn
from service.api.http.access import BackendDep
from service.api.http.gate import DEFAULT_BODY_BYTES
from service.api.http.problems import validation_error
from service.core.deadlines import Deadline
from service.core.errors import InvalidRequestError, LimitReachedError, RefusedError
from service.core.json_limits import check_json
from service.settings import Settings

OPTIONS_FIELD: Final = "request"
"""Form field that holds the other fields as JSON."""
PHOTO_FIELDS: Final = {False: ("images", "image"), True: ("a", "b")}
"""Form fields of photos, and of those of a verification."""
FILTER_OPTIONS: Final = ("tag", "metadata")
"""Plain forms of a filter, as of a list of subjects."""
PLAIN_TYPES: Final = ("string", "integer", "number", "boolean")
VERIFY_SIDES: Final = 2
MAX_FORM_FIELDS: Final = 16
TimeoutMs = Annotated[int | None, Header(alias="X-Request-Timeout-Ms", gt=0, include_in_schema=False)]

Body = TypeVar("Body", bound=BaseModel)


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
        request_too_large, unsupported_encoding: as :func:`set_body_limit`.
    """
    sides = model is VerifyIn
    set_body_limit(request, max_body_bytes(settings, VERIFY_SIDES if sides else settings.max_images))
    kind, numbers = media_type(request), MAX_EMBEDDINGS * dimension
    is_bare = not sides and (kind.startswith("image/") or kind == "application/octet-stream")
    if request.query_params and not is_bare:
        raise InvalidRequestError("query parameters are for a photo as the body: send options as JSON or form fields")
    if kind == "application/json":
        body = await read_json(request, model, numbers)
    elif kind == "multipart/form-data":
        body = _parse(model, _form_document(await read_form(request, settings.max_images + 1), model, numbers))
    elif is_bare:
        document: dict[str, Any] = {"images": [await request.body()]}
        for name, text in request.query_params.multi_items():
            _add_option(document, model, name, text)
        body = _parse(model, document)
    else:
        raise unsupported(kind)
    if isinstance(body, Photos):
        embeddings = body.embeddings if isinstance(body, Probes) else []
        if not body.photos and not embeddings:
            also = ", or embeddings" if isinstance(body, Probes) else ""
            raise InvalidRequestError(f"send at least one photo in images or urls{also}")
        if len(body.photos) > settings.max_images:
            raise InvalidRequestError(f"{len(body.photos)} photos, the limit is {settings.max_images}")
        if len(embeddings) > MAX_EMBEDDINGS:
            raise InvalidRequestError(f"{len(embeddings)} embeddings, the limit is {MAX_EMBEDDINGS}")
    return body


def max_body_bytes(settings: Settings, photos: int) -> int:
    """Return the maximum body size for a number of photos in base64, with room for other fields."""
    return photos * (settings.max_image_bytes * 4 // 3) + DEFAULT_BODY_BYTES


async def read_json(request: Request, model: type[Body], numbers: int = 0) -> Body:
    """Read a JSON body. ``numbers``: those that its embeddings may have.

    Raises InvalidRequestError: the body is not JSON of the model, or has too many values.
    """
    buffer = BytesIO()  # a list of chunks would leave holes in the heap, from which nothing returns to the system
    async for chunk in request.stream():
        buffer.write(chunk)
    body = buffer.getvalue()
    if not body:
        raise InvalidRequestError("body: Field required")
    return await asyncio.to_thread(_parse, model, body, numbers)


def _parse(model: type[Body], body: bytes | dict[str, Any], numbers: int = 0) -> Body:
    try:
        if isinstance(body, dict):
            return model.model_validate(body)
        check_json(body, numbers)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error.errors(include_input=False, include_url=False)) from error
    except ValueError as error:
        raise InvalidRequestError(f"the JSON has {error}") from error


class _FormInMemory(MultiPartParser):
    """Parser that keeps files in memory, since photos of people must not reach the disk."""

    spool_max_size = sys.maxsize
    is_complete = False

    def on_end(self) -> None:
        self.is_complete = True


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


def _form_document(parts: list[tuple[str, str | bytes]], model: type[Body], numbers: int) -> dict[str, Any]:
    """Return the document of a form's options and files. The field ``request`` has options as JSON."""
    names, is_verification = [name for name, _ in parts], model is VerifyIn
    photo_fields = PHOTO_FIELDS[is_verification]
    if names.count(OPTIONS_FIELD) > 1:
        raise InvalidRequestError(f"{OPTIONS_FIELD}: may be sent once in a form")
    document = _parse_object(dict(parts).get(OPTIONS_FIELD, "{}"), OPTIONS_FIELD, numbers)
    if "images" in document:
        raise InvalidRequestError("request: 'images' is allowed in a JSON body only; send photos as the body or files")
    for name, part in parts:
        if name == OPTIONS_FIELD:
            continue
        if isinstance(part, str):
            if name in photo_fields:
                raise InvalidRequestError(f"form field {name!r} has no file name: send the photo as a file, not text")
            _add_option(document, model, name, part)
        elif name not in photo_fields:
            raise InvalidRequestError(f"unknown file field {name!r}: name the photos {' or '.join(photo_fields)}")
        elif is_verification:
            _set(document, name, {"image": part})
        else:
            document.setdefault("images", []).append(part)
    return document


@cache
def plain_options(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return the JSON schemas of the options that fit in a form field, and but for ``urls`` in the query of a photo.

    A risk has one option for each of its forms, such as ``fpir``, and a filter the options of a list of subjects.
    """
    found: dict[str, Any] = {}
    for each in (model, RiskIn) if "risk" in model.model_fields else (model,):
        schema = each.model_json_schema()
        describe_defaults(schema)
        for name, option in schema["properties"].items():
            kinds = [kind for kind in option.get("anyOf", [option]) if kind.get("type") != "null"]
            if name == "urls" or (len(kinds) == 1 and kinds[0].get("type") in PLAIN_TYPES):
                found[name] = {key: text for key, text in option.items() if key == "description"} | kinds[0]
    if "filter" in model.model_fields:
        tags = FilterIn.model_json_schema()["properties"]["tags"]
        found["tag"] = tags | {"description": "Search only subjects with all of these tags; repeatable."}
        about = "Search only subjects with all of these metadata: a JSON object."
        found["metadata"] = {"type": "string", "description": about, "example": '{"floor": 3}'}
    return found


def describe_defaults(schema: dict[str, Any]) -> None:
    """Move a request's defaults to its descriptions: generators turn a field with a default into a required one."""
    for field in schema.get("properties", {}).values():
        default = field.pop("default", None)
        if default is not None:
            field["description"] = f"{field.get('description', '')} Default: {json.dumps(default)}.".lstrip()


def _add_option(document: dict[str, Any], model: type[BaseModel], name: str, text: str) -> None:
    """Add an option that was sent as text. Raises InvalidRequestError: it may be sent once and is there."""
    owner = None
    if name not in model.model_fields:
        owner = "filter" if name in FILTER_OPTIONS else "risk" if name in RiskIn.model_fields else None
    place = document if owner is None else document.setdefault(owner, {})
    if not isinstance(place, dict):
        raise InvalidRequestError(f"{owner}: must be an object")
    if name not in ("tag", "urls"):
        _set(place, name, _parse_object(text, name) if owner and name == "metadata" else text)
        return
    texts = place.setdefault("tags" if name == "tag" else name, [])
    if not isinstance(texts, list):
        raise InvalidRequestError(f"{name}: must be a list")
    texts.append(text)


def _set(place: dict[str, Any], name: str, value: Any) -> None:
    if name in place:
        raise InvalidRequestError(f"{name}: may be sent once")
    place[name] = value


def _parse_object(text: str | bytes, name: str, numbers: int = 0) -> dict[str, Any]:
    try:
        check_json(text if isinstance(text, bytes) else text.encode(), numbers)
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: is not JSON that can be read ({error})") from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"{name}: must be a JSON object")
    return document


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
        return plain_options(self.model).keys() - {"urls"} if self.takes_photos and not self.is_verification else set()

    async def read_json(self, request: Request) -> Any:
        """Raises InvalidRequestError, unsupported_media_type, unsupported_encoding."""
        set_body_limit(request, DEFAULT_BODY_BYTES)
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        kind = media_type(request)
        if has_body and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise unsupported(kind, "; send application/json")
        return await read_json(request, self.model)

    async def read_photos(
        self, request: Request, backend: BackendDep, timeout_ms: TimeoutMs = None
    ) -> AsyncIterator[Any]:
        """Yield the body. The time of the request counts from then on. Raises as :func:`read_photos`."""
        dimension = backend.recognizers.largest_dimension
        with backend.metrics.stage("read"):
            body = await read_photos(request, self.model, backend.settings, dimension)
        async with deadline(request, timeout_ms, backend.settings.deadline_s):
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


@asynccontextmanager
async def deadline(request: Request, timeout_ms: int | None, max_s: float) -> AsyncIterator[None]:
    """Bound the block by the client's deadline, ``max_s`` at most.

    Enter it after the body: a slow network does not use up the time.
    """
    with Deadline(max_s if timeout_ms is None else min(1000 * max_s, timeout_ms) / 1000) as current:
        watch = asyncio.create_task(_watch(request, current))
        try:
            yield
        finally:
            watch.cancel()


async def _watch(request: Request, current: Deadline) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    current.disconnect()


def set_body_limit(request: Request, size: int, streamed: bool = False, codings: tuple[str, ...] = ()) -> str | None:
    """Set the limit of a body, which the gate enforces while it is read. Return its content coding; None: identity.

    Args:
        request: the request.
        size: in bytes.
        streamed: the body goes to disk or the database in pieces, and does not count as held in memory.
        codings: content codings that the caller decodes.

    Raises unsupported_encoding; request_too_large: its declared length exceeds the limit.
    """
    declared = int(request.headers.get("content-length", 0))  # the server accepts digits only
    if declared > size:
        raise LimitReachedError("request_too_large", f"{declared} bytes, the limit is {size}")
    request.scope.update(body_limit=size, body_streamed=streamed)
    coding = request.headers.get("content-encoding", "").lower()
    if coding in codings:
        return coding
    if coding not in ("", "identity"):
        supported = ", ".join((*codings, "identity"))
        raise RefusedError(
            "unsupported_encoding",
            f"Content-Encoding: {coding[:80]!r}; this path supports: {supported}",
            headers={"Accept-Encoding": supported},  # RFC 9110, 15.5.16
        )
    return None


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported(kind: str, remedy: str = "") -> RefusedError:
    found = f"the header Content-Type is {kind!r}" if kind else "the header Content-Type is missing"
    return RefusedError("unsupported_media_type", f"{found}{remedy}")
