"""Decorators that make the description of a call a method of both clients."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from kith.requests import Call, Pages
from kith.senders import AsyncSender, Sender

P = ParamSpec("P")
Result = TypeVar("Result")
Now = TypeVar("Now", covariant=True)
Later = TypeVar("Later", covariant=True)
Client = Any
"""Sender or AsyncSender."""


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
