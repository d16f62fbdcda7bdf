"""Decorators that make the description of a call a method of both clients."""

from __future__ import annotations

import inspect
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from functools import cache, partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

from pydantic_core import to_jsonable_python

from kith.requests import Call, Pages, drop_none, json_call, list_call, path_segment, photo_arguments, texts
from kith.senders import AsyncSender, Sender
from kith.wire.fields import Page

P = ParamSpec("P")
Result = TypeVar("Result")
Now = TypeVar("Now", covariant=True)
Later = TypeVar("Later", covariant=True)
Client = Any
"""Sender or AsyncSender."""
ONLY_NEW: Final = {"If-None-Match": "*"}
"""Header of a request that is refused if its subject exists."""
PART: Final = re.compile(r"{(\w+)}")
PARSERS: Final[dict[Any, Callable[[bytes], Any]]] = {bytes: bytes, str: bytes.decode, dict[str, Any]: json.loads}
"""Parsers of what is no model."""


class Method(Generic[P, Now, Later]):
    """Method of a Sender, which returns ``Now``, and of an AsyncSender, which returns ``Later``.

    ``send(client, describe)`` sends the call or pages that ``describe()`` returns. Both methods get the name, docstring
    and parameters of the description; ``returns`` formats their return annotations from the result type of the call.
    """

    def __init__(
        self,
        describe: Callable[..., object],
        send: Callable[[Client, Callable[[], Any]], Any],
        returns: tuple[str, str] = ("{}", "{}"),
    ) -> None:
        self.describe = describe
        signature = inspect.signature(describe)
        result = str(signature.return_annotation).partition("[")[2].removesuffix("]")  # inside Call[...] or Pages[...]

        def method(form: str) -> Callable[..., Any]:
            def ask(client: Client, /, *args: Any, **kwargs: Any) -> Any:
                return send(client, partial(describe, client, *args, **kwargs))

            asking: Any = wraps(describe)(ask)
            asking.__signature__ = signature.replace(return_annotation=form.format(result))
            return asking  # type: ignore[no-any-return]

        self._now, self._later = map(method, returns)

    @overload
    def __get__(self, client: Sender, kind: type) -> Callable[P, Now]: ...

    @overload
    def __get__(self, client: AsyncSender, kind: type) -> Callable[P, Later]: ...

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...

    def __get__(self, client: object, kind: type) -> Callable[..., Any]:
        method = self._later if issubclass(kind, AsyncSender) else self._now
        return method if client is None else MethodType(method, client)


def one(describe: Callable[Concatenate[Any, P], Call[Result]]) -> Method[P, Result, Coroutine[Any, Any, Result]]:
    """Send the call and return its parsed response.

    An AsyncSender describes every call in a thread: reading a file or encoding an image would stop the event loop."""
    return Method(describe, lambda client, describing: client._describe_and_send(describing))


def call(
    method: str, path: str, repeatable: bool = True, in_query: bool = False, **names: str
) -> Callable[[Callable[Concatenate[Any, P], Call[Result]]], Method[P, Result, Coroutine[Any, Any, Result]]]:
    """Send the call that a signature describes by itself, and return its parsed response.

    Parameters that ``path`` names are parts of it. The others are fields of the JSON body, or of the query of a GET or
    ``in_query``, which may have other ``names``; None leaves one out. The response is parsed as what the signature
    returns."""

    def build(result: Any, place: str, fields: dict[str, Any]) -> Call[Any]:
        query = in_query or method == "GET"
        arguments = {"params": fields} if query else {"json": to_jsonable_python(fields)} if fields else {}
        return Call(method, place, _parser(result), arguments, repeatable=repeatable)

    return lambda describe: one(_described(describe, path, build, names))


def photo_call(
    path: str, once: bool = False
) -> Callable[[Callable[Concatenate[Any, P], Call[Result]]], Method[P, Result, Coroutine[Any, Any, Result]]]:
    """Send photos and embeddings to ``path``, with the other parameters as options, and return the parsed response.

    ``once``: a parameter ``idempotency_key``, by default a random key, makes the server do a repeated call once."""

    def build(model: Any, place: str, fields: dict[str, Any]) -> Call[Any]:
        headers = ONLY_NEW if fields.pop("only_new", False) else {}
        if once:
            headers = {"Idempotency-Key": fields.pop("idempotency_key", None) or uuid.uuid4().hex, **headers}
        for one, several in (("photo", "photos"), ("url", "urls"), ("embedding", "embeddings")):
            fields[several] = [fields.pop(one)] if one in fields else fields.get(several, ())
        return json_call(model, "POST", place, **photo_arguments(headers=headers, **fields))

    return lambda describe: one(_described(describe, path, build, {}))


def pages(
    path: str, limit: int | None = None, **names: str
) -> Callable[[Callable[Concatenate[Any, P], Pages[Result]]], Method[P, Iterator[Result], AsyncIterator[Result]]]:
    """Iterate over the items of the list at ``path``, ``limit`` of them a request. Parameters are those of ``call``."""

    def build(item: Any, place: str, fields: dict[str, Any]) -> Pages[Any]:
        return list_call(Page[item], place, fields | drop_none(limit=limit))

    return lambda describe: each(_described(describe, path, build, names))


def _described(
    describe: Callable[..., Any],
    path: str,
    build: Callable[[Any, str, dict[str, Any]], Any],
    names: Mapping[str, str],
) -> Any:
    """Return ``describe`` with a body: ``build`` gets what it returns, the path, and the arguments beside it, which may
    have other ``names`` there."""
    signature = inspect.signature(describe)
    kinds = {each.kind: name for name, each in signature.parameters.items()}
    further = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
    parameters = signature.parameters.values()
    several = {each.name for each in parameters if str(each.annotation).startswith(("Iterable", "Sequence"))}
    returned = SimpleNamespace(__annotations__={"return": signature.return_annotation})  # parameters need Pillow
    result = cache(lambda: get_args(get_type_hints(returned, describe.__globals__)["return"])[0])  # inside Call[...]

    @wraps(describe)
    def described(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        rest = given.arguments.pop(further, {})
        fields = drop_none(**given.arguments, **rest)
        fields.pop("self", None)
        fields |= {name: texts(name, fields[name]) for name in several & fields.keys()}
        place = PART.sub(lambda part: path_segment(fields.pop(part[1])), path)
        return build(result(), place, {names.get(name, name): value for name, value in fields.items()})

    return described


def _parser(result: Any) -> Callable[[bytes], Any]:
    if get_origin(result) is list:
        model: Any = Page.__class_getitem__(get_args(result))
        return lambda body: model.model_validate_json(body).data
    return PARSERS.get(result) or result.model_validate_json


def each(
    describe: Callable[Concatenate[Any, P], Pages[Result]],
) -> Method[P, Iterator[Result], AsyncIterator[Result]]:
    """Iterate over the items of all pages."""
    forms = ("Iterator[{}]", "AsyncIterator[{}]")
    return Method(describe, lambda client, describing: client._list(describing()), forms)


def stream(
    describe: Callable[Concatenate[Any, P], Call[Result]],
) -> Method[P, Generator[Result, None, None], AsyncGenerator[Result, None]]:
    """Iterate over the events of a stream, which has no end, or over the bytes of a response."""

    def send(client: Client, describing: Callable[[], Call[Result]]) -> Any:
        call = describing()
        return client._stream(call) if call.parse is bytes else client._follow(call)

    return Method(describe, send, ("Generator[{}, None, None]", "AsyncGenerator[{}, None]"))
