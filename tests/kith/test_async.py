"""Asynchronous client."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import AsyncKith, KithClientError, KithUnreachableError, Photo
from kith.calls import Calls
from kith.methods import Method
from kith.requests import FileStream
from tests.conftest import jpeg
from tests.scripted import BROKEN, BUSY, ENROLLED, LIMITED, OK, Answer, answering


def test_enroll_identify_export_and_import(
    server: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    async def work() -> None:
        async with AsyncKith(server) as kith:
            await kith.create_gallery("awaited")
            people: dict[str, Photo] = {"ada": jpeg(astronaut), "tom": actor}
            await asyncio.gather(*(kith.enroll("awaited", name, photo) for name, photo in people.items()))
            (found,) = (await kith.identify("awaited", astronaut)).results
            assert (found.outcome, found.subject) == ("identified", "ada")
            assert {subject.id async for subject in kith.subjects("awaited")} == {"ada", "tom"}
            file = tmp_path / "g.ndjson"
            file.write_bytes(b"".join([piece async for piece in kith.export_gallery("awaited")]))
            sent: list[int] = []
            taken = await kith.import_gallery("copy", file, create=True, progress=sent.append)
            assert (taken.template_count, sum(sent)) == (2, file.stat().st_size)
            assert {"awaited", "copy"} <= await kith.gallery_names()
            with pytest.raises(KithClientError, match="gallery_not_found"):
                await kith.gallery("nothing")
            for name in ("awaited", "copy"):
                await kith.delete_gallery(name)

    asyncio.run(work())


def test_cancellation_closes_the_connection() -> None:
    with answering(Answer(late=True), OK) as script:

        async def work() -> None:
            async with AsyncKith(script.url) as kith:
                call = asyncio.ensure_future(kith.ready())
                await asyncio.to_thread(script.arrived.wait, 10)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                assert await asyncio.to_thread(script.gone.wait, 10)
                assert (await kith.ready()).status == "ok"

        asyncio.run(work())
    assert len(script.asked) == 2


def test_calls_above_the_connection_limit_wait(server: str) -> None:
    async def work() -> None:
        async with AsyncKith(server, connections=4, timeout_s=60) as kith:
            answers = await asyncio.gather(*(kith.health() for _ in range(300)))
            assert {answer.status for answer in answers} == {"ok"}

    asyncio.run(work())


def test_the_retry_policy_is_the_same() -> None:
    with answering(BROKEN, BUSY, LIMITED, ENROLLED, BROKEN) as script:

        async def work() -> None:
            async with AsyncKith(script.url) as kith:
                assert (await kith.enroll("g", "ada", b"photo")).subject == "ada"
                with pytest.raises(KithUnreachableError) as raised:
                    await kith.roll_back("g")
                assert raised.value.maybe_done

        asyncio.run(work())
    assert len(script.asked) == 5


def test_no_call_reads_a_photo_or_a_file_in_the_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every call is tried, so that a new one that takes a photo cannot be forgotten."""
    threads: list[int] = []

    class Opened:
        def read(self) -> bytes:
            threads.append(threading.get_ident())
            return b"photo"

    class Stream(FileStream):
        def __init__(self, *arguments: Any) -> None:
            threads.append(threading.get_ident())
            super().__init__(*arguments)

    monkeypatch.setattr("kith.calls.FileStream", Stream)
    (tmp_path / "file").write_bytes(b"content")
    samples = {"archive": tmp_path / "file", "file": tmp_path / "file", "scopes": ["read"]}

    def arguments(describe: Any) -> tuple[list[Any], bool]:
        """Return sample arguments, and whether one is a photo or a file."""
        values, reads = [], False
        for each in list(inspect.signature(describe).parameters.values())[1:]:
            photo = any(kind in str(each.annotation) for kind in ("Photo", "Side"))
            needed = each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
            if photo or needed:
                values.append(Opened() if photo else samples.get(each.name, "x"))
                reads = reads or photo or each.name in ("archive", "file")
        return values, reads

    async def work(url: str) -> set[str]:
        reading = set()
        async with AsyncKith(url, attempts=1) as kith:
            for name, method in vars(Calls).items():
                if not isinstance(method, Method) or not (given := arguments(method.describe))[1]:
                    continue
                threads.clear()
                with pytest.raises(KithClientError):
                    await getattr(kith, name)(*given[0])
                assert threads and threading.get_ident() not in threads, name
                reading.add(name)
        return reading

    with answering(Answer(400, b'{"code": "invalid_request"}')) as script:
        reading = asyncio.run(work(script.url))
    assert reading >= {"detect", "embed", "verify", "enroll", "identify", "add_decoy", "import_gallery", "create_album"}
