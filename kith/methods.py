"""Decorators that make the description of a call a method of both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from kith.requests import Call, Pages
from kith.senders import AsyncSender, Sender
from kith.transport import build_arguments

P = ParamSpec("P")
Result = TypeVar("Result")
Now = TypeVar("Now", covariant=True)
Later = TypeVar("Later", covariant=True)


def check(call: Call[Result]) -> Call[Result]:
    """Refuse what cannot be sent where a list or stream is asked for, not at its first item."""
    build_arguments(call, timeout_s=0)
    return call


class Method(Generic[P, Now, Later]):
    """Method of both clients: ``now`` of a Sender, ``later`` of an AsyncSender.

    Both get the name, docstring and parameters of ``describe``. ``returns`` formats their return annotations from the
    result type of the call.
    """

    def __init__(
        self,
        describe: Callable[..., object],
        now: Callable[..., Now],
        later: Callable[..., Later],
        returns: tuple[str, str] = ("{}", "{}"),
    ) -> None:
        self.describe, self._now, self._later = describe, now, later
        signature = inspect.signature(describe)
        result = str(signature.return_annotation).partition("[")[2].removesuffix("]")  # inside Call[...] or Pages[...]
        for method, form in zip((now, later), returns, strict=True):
            wraps(describe)(method)
            method.__signature__ = signature.replace(return_annotation=form.format(result))  # type: ignore[attr-defined]

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

    def now(client: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return client._send(describe(client, *args, **kwargs))

    async def later(client: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await client._send(await asyncio.to_thread(describe, client, *args, **kwargs))

    return Method(describe, now, later)


def each(
    describe: Callable[Concatenate[Any, P], Pages[Result]],
) -> Method[P, Iterator[Result], AsyncIterator[Result]]:
    """Iterate over the items of all pages."""

    def now(client: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Result]:
        return client._list(describe(client, *args, **kwargs))

    def later(client: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Result]:
        pages = describe(client, *args, **kwargs)
        check(pages.page(None))
        return client._list(pages)

    return Method(describe, now, later, ("Iterator[{}]", "AsyncIterator[{}]"))


def stream(
    describe: Callable[Concatenate[Any, P], Call[Result]],
) -> Method[P, Generator[Result, None, None], AsyncGenerator[Result, None]]:
    """Iterate over the events of a stream, which has no end, or over the bytes of a response."""

    def now(client: Sender, /, *args: P.args, **kwargs: P.kwargs) -> Generator[Result, None, None]:
        call = check(describe(client, *args, **kwargs))
        return client._stream(call) if call.parse is bytes else client._follow(call)

    def later(client: AsyncSender, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Result, None]:
        call = check(describe(client, *args, **kwargs))
        return client._stream(call) if call.parse is bytes else client._follow(call)

    return Method(describe, now, later, ("Generator[{}, None, None]", "AsyncGenerator[{}, None]"))
