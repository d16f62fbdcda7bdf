"""JSON bodies: scanned as they arrive, and parsed in a worker thread unless they are small.

A body with photos may have hundreds of megabytes. Its long strings are kept apart from the document, which is then
small, and each is decoded alone: a parser of the whole body would hold the interpreter for seconds.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.api.problems import validation_error
from service.api.schemas import LongStrings
from service.errors import ImageTooLargeError, InvalidRequestError, RequestTooLargeError
from service.json_limits import JsonLimits, JsonScanner, check_json

SMALL_BYTES: Final = 65_536
LONG_STRING_BYTES: Final = 100_000
DOCUMENT_BYTES: Final = 1_000_000
"""Most bytes of a document without photos and embeddings."""
NUMBER_BYTES: Final = 64
"""Bytes of a number of an embedding, with the white space of indented JSON."""
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


class JsonRequest(Request):
    """Request whose JSON is checked before it is parsed: FastAPI parses it where the body is a route's parameter."""

    async def json(self) -> Any:
        """Raises InvalidRequestError, json.JSONDecodeError."""
        body = await self.body()
        return await away_if_large(len(body), lambda: _parse(body))


async def read_json(request: Request, model: type[Body], photos: int, photo_bytes: int, numbers: int) -> Body:
    """Read a body of at most so many photos and numbers of embeddings.

    Raises:
        InvalidRequestError: it is no JSON of the model, or has too many values.
        ImageTooLargeError: a string is longer than a photo's base64 can be.
        RequestTooLargeError: the document has too many bytes without its photos.
    """
    largest = DOCUMENT_BYTES + photos * LONG_STRING_BYTES + numbers * NUMBER_BYTES
    reader = _Reader(JsonLimits(numbers=numbers), largest, 2 * photo_bytes)
    async for piece in request.stream():
        reader.feed(piece)
    return await away_if_large(reader.size, lambda: reader.parse(model))


async def away_if_large(size: int, parse: Callable[[], Result]) -> Result:
    """Call ``parse`` of so many bytes, in a worker thread unless they are few."""
    return parse() if size <= SMALL_BYTES else await asyncio.to_thread(parse)


def _parse(body: bytes) -> Any:
    try:
        check_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON has {error}") from error
    return json.loads(body)


class _Reader:
    """Reader of one body. ``largest``, ``longest``: bytes of the document without long strings, and of a string."""

    def __init__(self, limits: JsonLimits, largest: int, longest: int) -> None:
        self.size = 0
        self._scanner = JsonScanner(limits)
        self._largest, self._longest = largest, max(longest, LONG_STRING_BYTES)
        self._document = bytearray()
        self._string = bytearray()  # pieces would leave holes in the heap, which the system does not get back
        self._long = LongStrings()

    def feed(self, piece: bytes) -> None:
        self.size += len(piece)
        try:
            for in_string, run in self._scanner.runs(piece):
                self._take(in_string, run)
        except ValueError as error:
            raise InvalidRequestError(f"the JSON has {error}") from error

    def _take(self, in_string: bool, run: bytes) -> None:
        if in_string:
            self._string += run
            if len(self._string) > self._longest:
                raise ImageTooLargeError(f"a photo has more than {self._longest} bytes in base64")
        else:
            self._end_string()
            self._keep(run)

    def _end_string(self) -> None:
        if len(self._string) > LONG_STRING_BYTES:
            name = secrets.token_hex(16)
            self._long[name] = self._string
            self._keep(name.encode())
        else:
            self._keep(self._string)
        self._string = bytearray()

    def _keep(self, run: bytes | bytearray) -> None:
        self._document += run
        if len(self._document) > self._largest:
            raise RequestTooLargeError(f"without its photos the JSON has more than {self._largest} bytes")

    def parse(self, model: type[Body]) -> Body:
        self._end_string()  # of a body that ends too early
        try:
            body = model.model_validate_json(self._document, context=self._long)
        except ValidationError as error:
            raise validation_error(error.errors(include_input=False, include_url=False)) from error
        if self._long:
            raise InvalidRequestError(f"a string that is no photo has more than {LONG_STRING_BYTES} bytes")
        return body
