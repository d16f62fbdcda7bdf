"""Decorators that make the description of a call a method of both clients."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from functools import cache, partial, wraps
from types import MethodType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, get_args, get_type_hints, overload

from kith.requests import Call, Pages, drop_none, list_call, path_segment
from kith.senders import AsyncSender, Sender
from kith.wire.fields import Page

P = ParamSpec("P")
Result = TypeVar("Result")
Now = TypeVar("Now", covariant=True)
Later = TypeVar("Later", covariant=True)
Client = Any
"""Sender or AsyncSender."""
PART: Final = re.compile(r"{(\w+)}")
PARSERS: Final[dict[Any, Callable[[bytes], Any]]] = {bytes: bytes, str: bytes.decode, dict[str, Any]: json.loads}
"""Parsers of what is no model."""


class Method(Generic[P, Now, Later]):
    """Method of a Sender, which returns ``Now``, and of an AsyncSender, which returns ``Later``.

    ``send(client, describe)`` sends the call or pages that ``describe()`` returns. Both methods get the name, docstring
    and parameters of the description; ``returns`` formats their return annotations from the result type of the call.
    ``awaited``: the second one is a coroutine function.
    """

    def __init__(
        self,
        describe: Callable[..., object],
        send: Callable[[Client, Callable[[], Any]], Any],
        returns: tuple[str, str] = ("{}", "{}"),
        awaited: bool = False,
    ) -> None:
        self.describe = describe
        signature = inspect.signature(describe)
        result = str(signature.return_annotation).partition("[")[2].removesuffix("]")  # inside Call[...] or Pages[...]

        def method(form: str, awaited: bool = False) -> Callable[..., Any]:
            def ask(client: Client, /, *args: Any, **kwargs: Any) -> Any:
                return send(client, partial(describe, client, *args, **kwargs))

            async def ask_later(client: Client, /, *args: Any, **kwargs: Any) -> Any:
                return await ask(client, *args, **kwargs)

            asking: Any = wraps(describe)(ask_later if awaited else ask)
            asking.__signature__ = signature.replace(return_annotation=form.format(result))
            return asking  # type: ignore[no-any-return]

        self._now, self._later = method(returns[0]), method(returns[1], awaited)

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
    return Method(describe, lambda client, describing: client._describe_and_send(describing), awaited=True)


def call(
    method: str, path: str, repeatable: bool = True
) -> Callable[[Callable[Concatenate[Any, P], Call[Result]]], Method[P, Result, Coroutine[Any, Any, Result]]]:
    """Send the call that a signature describes by itself, and return its parsed response.

    Parameters that ``path`` names are parts of it. The others are fields of the JSON body, or of the query of a GET;
    None leaves one out. The response is parsed as what the signature returns."""

    def build(result: Any, place: str, fields: dict[str, Any]) -> Call[Any]:
        arguments = {"params" if method == "GET" else "json": fields} if fields else {}
        parse = PARSERS.get(result) or result.model_validate_json
        return Call(method, place, parse, arguments, repeatable=repeatable)

    return lambda describe: one(_described(describe, path, build))


def pages(
    path: str,
) -> Callable[[Callable[Concatenate[Any, P], Pages[Result]]], Method[P, Iterator[Result], AsyncIterator[Result]]]:
    """Iterate over the items of the list at ``path``. Parameters are those of :func:`call`."""

    def build(item: Any, place: str, fields: dict[str, Any]) -> Pages[Any]:
        return list_call(Page[item], place, fields)

    return lambda describe: each(_described(describe, path, build))


def _described(describe: Callable[..., Any], path: str, build: Callable[[Any, str, dict[str, Any]], Any]) -> Any:
    """Return ``describe`` with a body: ``build`` gets what it returns, the path, and the arguments beside it."""
    signature = inspect.signature(describe)
    result = cache(lambda: get_args(get_type_hints(describe)["return"])[0])  # inside Call[...] or Pages[...]

    @wraps(describe)
    def described(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        fields = drop_none(**dict(zip(signature.parameters, given.args, strict=False)) | given.kwargs)
        fields.pop("self", None)
        place = PART.sub(lambda part: path_segment(fields.pop(part[1])), path)
        return build(result(), place, fields)

    return described


def each(
    describe: Callable[Concatenate[Any, P], Pages[Result]],
) -> Method[P, Iterator[Result], AsyncIterator[Result]]:
    """Iterate over the items of all pages. What cannot be sent is refused where the list is asked for."""

    def send(client: Client, describing: Callable[[], Pages[Result]]) -> Any:
        pages = describing()
        client._request(pages.page(None))
        return client._list(pages)

    return Method(describe, send, ("Iterator[{}]", "AsyncIterator[{}]"))


def stream(
    describe: Callable[Concatenate[Any, P], Call[Result]],
) -> Method[P, Generator[Result, None, None], AsyncGenerator[Result, None]]:
    """Iterate over the events of a stream, which has no end, or over the bytes of a response."""

    def send(client: Client, describing: Callable[[], Call[Result]]) -> Any:
        call = describing()
        client._request(call)
        return client._stream(call) if call.parse is bytes else client._follow(call)

    return Method(describe, send, ("Generator[{}, None, None]", "AsyncGenerator[{}, None]"))
