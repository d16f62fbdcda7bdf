"""The client: every operation of the API, in both classes alike; what is repeated; what may be given as a photo."""

from __future__ import annotations

import asyncio
import inspect
import io
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import FunctionType
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from service.api.schemas import EmbedIn, EnrolIn, IdentifyIn, VerifyIn
from service.client import AsyncKith, Kith, KithClientError, KithUnreachableError, Photo, calls
from service.client.photos import payload_of
from service.client.requests import Call, Pages
from service.client.retries import LONGEST_PAUSE_S, retry_after_s
from service.server import embedded
from service.settings import load_settings
from tests.conftest import ROOT, jpeg
from tests.faults.servers import Server
from tests.scripted import Answer, answering

BUSY = Answer(503, b'{"code": "overloaded", "detail": "the queue is full"}', {"Retry-After": "0"})
LIMITED = Answer(429, b'{"code": "rate_limited"}', {"Retry-After": "1"})
BROKEN = Answer(breaks=True)
LOST = Answer(504, b'{"code": "node_lost"}')
OK = Answer()
ENROLLED = Answer(201, b'{"subject": "ada", "enrolled": 0, "results": []}')
DESCRIBED = {
    name: found
    for name, found in vars(calls).items()
    if isinstance(found, FunctionType) and found.__module__ == calls.__name__ and not name.startswith("_")
}
SAMPLES: dict[str, Any] = {"a": [0.5], "b": [0.5], "archive": __file__, "file": __file__, "scopes": ["read"]}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


# Both are one


def test_both_have_every_call_with_the_same_parameters() -> None:
    both = {"close", "gallery_names", "wait_for"}
    public = {
        kind: {
            name: method for name in dir(kind) if not name.startswith("_") and callable(method := getattr(kind, name))
        }
        for kind in (Kith, AsyncKith)
    }
    for kind, methods in public.items():
        assert methods.keys() == DESCRIBED.keys() | both, kind
    for name, method in public[Kith].items():
        there = public[AsyncKith][name]
        assert list(inspect.signature(method).parameters.values()) == list(inspect.signature(there).parameters.values())
        assert method.__doc__ == there.__doc__ or name == "close"
    assert inspect.signature(Kith.identify).return_annotation == "IdentifyOut"
    assert inspect.signature(Kith.galleries).return_annotation == "Iterator[GalleryOut]"
    assert inspect.signature(AsyncKith.identify).return_annotation == "Awaitable[IdentifyOut]"


def test_every_operation_is_a_call_and_every_call_an_operation(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json").json()
    operations = {
        (method.upper(), path): re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    reached = set()
    for name, describe in DESCRIBED.items():
        for call in described(describe):
            found = [key for key, path in operations.items() if key[0] == call.method and path.fullmatch(call.path)]
            # A literal path is also one of a parameter.
            assert found, f"{name}: {call.method} {call.path} is no operation"
            reached.add(min(found, key=lambda key: key[1].count("{")))
    assert operations.keys() - reached == set()


def described(describe: Callable[..., Any]) -> list[Call[Any]]:
    """With the arguments that it needs; the audit of everything, and of a gallery."""
    needed: list[Any] = []
    for name, parameter in inspect.signature(describe).parameters.items():
        by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if by_place and parameter.default is parameter.empty:
            needed.append(SAMPLES.get(name, "x"))
    made = [describe(*needed), *([describe(*needed, "x")] if describe is calls.audit else [])]
    return [one.page(None) if isinstance(one, Pages) else one for one in made]


@pytest.mark.parametrize(
    ("describe", "model", "else_named"),
    [
        (calls.embed, EmbedIn, {"images"}),
        (calls.identify, IdentifyIn, {"images"}),
        (calls.enrol, EnrolIn, {"images"}),
        (calls.verify, VerifyIn, set[str]()),
    ],
)
def test_every_option_of_a_request_is_a_parameter(
    describe: Callable[..., Any], model: Any, else_named: set[str]
) -> None:
    assert model.model_fields.keys() - else_named <= inspect.signature(describe).parameters.keys()


def test_importing_it_brings_nothing_that_a_server_needs() -> None:
    heavy = ("cv2", "torch", "sqlalchemy", "faiss", "onnxruntime", "onnx", "fastapi", "scipy", "PIL", "pyarrow")
    program = f"import sys; from service.client import Kith; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Photos and embeddings


def test_a_photo_may_be_given_in_many_ways(kith: Kith, astronaut: NDArray[np.uint8], tmp_path: Path) -> None:
    file, image = io.BytesIO(), Image.fromarray(astronaut)
    image.save(file, "PNG")
    path = tmp_path / "astronaut.png"
    path.write_bytes(file.getvalue())
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(astronaut)))
    turned.getexif()[0x0112] = 6  # as a camera held upright says
    with path.open("rb") as opened:
        given = (path, str(path), file.getvalue(), memoryview(file.getvalue()), opened, image, astronaut, turned)
        found = [kith.detect(photo).images[0] for photo in given]
    assert found[0].faces
    assert all(one == found[0] for one in found)
    grey = kith.detect(np.asarray(image.convert("L"))).images[0]
    assert grey == kith.detect(image.convert("L")).images[0]
    assert len(kith.detect(image.convert("CMYK"), *given[:2]).images) == 3


@pytest.mark.parametrize(
    ("photo", "said"),
    [
        (3, "int is no photo"),
        (io.StringIO("text"), "open as text"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \(4, 4, 3\) is no photo"),
        (np.zeros((4, 4, 7), np.uint8), "is no photo"),
        ("https://cdn.example.org/ada.jpg", "urls="),
    ],
)
def test_what_is_no_photo_is_said_to_be_none(kith: Kith, photo: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        kith.detect(photo)


def test_embeddings_are_arrays_and_may_be_sent_back(kith: Kith, gallery: str, astronaut: NDArray[np.uint8]) -> None:
    seen = kith.embed(astronaut)
    vector = seen.images[0].faces[0].embedding
    assert vector is not None
    assert vector.dtype == np.float32
    assert vector.shape == (kith.model().dimension,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    kith.enrol(gallery, "ada", embeddings=[vector], recogniser=seen.recogniser)
    (found,) = kith.identify(gallery, embeddings=[vector]).results
    assert (found.subject, found.similarity) == ("ada", 1.0)
    assert kith.verify(vector, astronaut, fmr=0.001).outcome == "same"
    assert kith.verify((gallery, "ada"), vector).outcome == "same"
    again = type(seen).model_validate_json(seen.model_dump_json()).images[0].faces[0].embedding
    assert again is not None
    assert (again == vector).all()


# What is done again


@pytest.mark.parametrize("answers", [[BUSY, LIMITED], [BROKEN, BUSY], [Answer(502), LOST]], ids=str)
def test_what_may_be_repeated_is(answers: list[Answer]) -> None:
    with answering(*answers, ENROLLED) as script, Kith(script.url) as kith:
        before = time.monotonic()
        assert kith.enrol("g", "ada", b"photo").subject == "ada"
        waited = time.monotonic() - before
    assert waited >= sum(float(answer.headers.get("Retry-After", 0)) for answer in answers)
    keys = {headers["Idempotency-Key"] for _, _, headers, _ in script.asked}
    assert (len(script.asked), len(keys)) == (3, 1)
    assert {body for *_, body in script.asked} == {b"photo"}


@pytest.mark.parametrize(
    "failure", [BROKEN, Answer(502), LOST, Answer(503, b'{"code": "storage_unavailable"}')], ids=str
)
def test_what_may_have_been_done_is_not_done_again(failure: Answer) -> None:
    with answering(failure, OK) as script, Kith(script.url) as kith, pytest.raises(KithClientError) as raised:
        kith.create_key("door", ["read"])
    assert len(script.asked) == 1
    assert isinstance(raised.value, KithUnreachableError) is (failure is BROKEN)
    assert raised.value.maybe_done
    assert "look before you repeat" in str(raised.value)


def test_an_archive_is_sent_once(tmp_path: Path) -> None:
    (tmp_path / "people.zip").write_bytes(b"PK")
    with answering(BROKEN, OK) as script, Kith(script.url) as kith, pytest.raises(KithUnreachableError) as raised:
        kith.enrol_archive("g", tmp_path / "people.zip")
    assert raised.value.maybe_done
    assert len(script.asked) == 1


def test_a_refusal_was_not_done() -> None:
    with answering(BUSY) as script, Kith(script.url, attempts=1) as kith, pytest.raises(KithClientError) as raised:
        kith.create_key("door", ["read"])
    assert not raised.value.maybe_done


# What is not Kith, and what is no address or key


@pytest.mark.parametrize(
    "answer",
    [
        Answer(404, b"<html>nothing here</html>"),
        Answer(404, b'{"error": "nothing here"}'),
        Answer(400, b'{"code": null, "remedy": null}'),
        Answer(400, b'["code"]'),
        Answer(200, b"<html>welcome, hunter2</html>"),
        Answer(200, b'{"password": "hunter2"}'),
        Answer(200, b"\xff\xfe"),
        Answer(200, b"no gzip", {"Content-Encoding": "gzip"}),
        Answer(500, b"no gzip", {"Content-Encoding": "gzip"}),
    ],
    ids=str,
)
def test_an_answer_that_is_not_kiths_is_said_to_be_none(answer: Answer) -> None:
    async def awaited(url: str) -> None:
        async with AsyncKith(url) as kith:
            await kith.health()

    with answering(answer) as script:
        with Kith(script.url) as kith, pytest.raises(KithClientError) as raised:
            kith.health()
        with pytest.raises(KithClientError) as raised_awaited:
            run(awaited(script.url))
    for error in (raised.value, raised_awaited.value):
        assert (error.status, error.code, error.problem["code"]) == (answer.status, "unknown", "unknown")
        assert "does not look like Kith" in str(error)
        assert "hunter2" not in str(error)


def test_an_export_that_cannot_be_unpacked_is_not_kiths() -> None:
    with answering(Answer(200, b"no gzip", {"Content-Encoding": "gzip"})) as script, Kith(script.url) as kith:
        with pytest.raises(KithClientError, match="does not look like Kith"):
            list(kith.export_gallery("g"))
        assert len(script.asked) == 1


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
@pytest.mark.parametrize(
    ("url", "key", "code"),
    [
        ("http://host:abc", None, "invalid_address"),
        ("ftp://host", None, "invalid_address"),
        ("localhost:8000", None, "invalid_address"),
        ("http://", None, "invalid_address"),
        ("http://ada:hunter2", None, "invalid_address"),
        ("http://host", "hunter2schl\xfcssel", "invalid_key"),
        ("http://host", "hunter2\nX-Other: 1", "invalid_key"),
    ],
)
def test_what_is_no_address_and_no_key_is_refused_unquoted(
    kind: type[Kith | AsyncKith], url: str, key: str | None, code: str
) -> None:
    with pytest.raises(KithClientError) as raised:
        kind(url, key)
    assert raised.value.code == code
    assert "hunter2" not in str(raised.value)


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
def test_no_proxy_sees_what_goes_to_this_machine(kind: type[Kith | AsyncKith], monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(client: AsyncKith) -> None:
        async with client:
            await client.health()

    with answering(OK) as proxy, answering(OK) as script:
        for name in PROXIES:
            monkeypatch.setenv(name, proxy.url)
        client = kind(script.url, "KEY")
        if isinstance(client, Kith):
            with client:
                client.health()
        else:
            run(asked(client))
        assert (len(script.asked), proxy.asked) == (1, [])
        with Kith("http://kith.example", attempts=1) as elsewhere:
            elsewhere.health()
        assert proxy.asked[0][1] == "http://kith.example/healthz"


@pytest.mark.parametrize("kind", [Kith, AsyncKith])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("HTTP_PROXY", "hunter2:::"), ("ALL_PROXY", "gopher://hunter2"), ("SSL_CERT_FILE", "/hunter2")],
)
def test_an_environment_that_cannot_be_used_is_refused_unquoted(
    kind: type[Kith | AsyncKith], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    kind("http://127.0.0.1:9")
    with pytest.raises(KithClientError, match=variable) as raised:
        kind("https://kith.example")
    assert raised.value.code == "invalid_environment"
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_what_is_no_json_is_not_sent(value: Any) -> None:
    with answering(OK) as script, Kith(script.url) as kith:
        with pytest.raises(KithClientError, match="no JSON") as raised:
            kith.update_subject("g", "s", metadata={"a": value})
        assert (raised.value.code, script.asked) == ("invalid_request", [])


def test_a_key_that_cannot_be_is_refused_by_the_server(kith: Kith) -> None:
    wrong: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("x", ["nope"], {}),
        ("x" * 129, ["read"], {}),
        ("x", ["admin"], {"galleries": ["a b"]}),
        ("x", ["admin"], {"expires_at": datetime.now(UTC) - timedelta(days=1)}),
    ]
    for name, scopes, options in wrong:
        with pytest.raises(KithClientError) as raised:
            kith.create_key(name, scopes, **options)
        assert raised.value.code == "invalid_request"


def test_a_key_may_end_its_line() -> None:
    with answering(OK) as script, Kith(script.url, "key\n") as kith:
        kith.health()
    assert script.asked[0][2]["Authorization"] == "Bearer key"


def test_what_cannot_be_sent_is_tried_once() -> None:
    call = Call("GET", "gopher://host/", bytes)
    with answering(OK) as script, Kith(script.url, attempts=100) as kith, pytest.raises(KithUnreachableError) as raised:
        kith._send(call)
    assert not raised.value.maybe_done


def test_an_error_shows_no_password_of_the_address() -> None:
    with Kith("http://ada:hunter2@127.0.0.1:9", attempts=1) as kith, pytest.raises(KithUnreachableError) as raised:
        kith.health()
    assert "http://127.0.0.1:9" in str(raised.value)
    assert "hunter2" not in str(raised.value) + str(raised.value.problem)


def test_no_attempt_is_no_number_of_attempts() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Kith("http://127.0.0.1:9", attempts=0)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B"])
def test_a_grey_image_of_16_bits_is_sent_as_it_is(mode: str) -> None:
    grey = np.arange(0, 60_000, 1000).reshape(6, 10)
    kinds = {"I": "<i4", "I;16": "<u2", "I;16B": ">u2"}
    image = Image.frombytes(mode, (10, 6), grey.astype(kinds[mode]).tobytes())
    sent = Image.open(io.BytesIO(payload_of(image)))
    assert (np.asarray(sent) == grey).all()


@pytest.mark.parametrize("mode", ["F", "La", "RGBa"])
def test_an_image_whose_white_is_anywhere_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode {mode} is no photo: convert it"):
        payload_of(Image.new(mode, (4, 4)))


def test_grey_beyond_16_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 65535"):
        payload_of(Image.new("I", (4, 4), 70_000))


def test_an_embedding_without_a_number_is_refused() -> None:
    with Kith("http://127.0.0.1:9") as kith, pytest.raises(ValueError, match="NaN"):
        kith.identify("g", embeddings=[[float("nan"), 1.0]])


def test_what_was_refused_is_tried_again_whatever_it_is() -> None:
    made = Answer(201, b'{"name": "g"}')
    with (
        answering(BUSY, LIMITED, made) as script,
        Kith(script.url) as kith,
        pytest.raises(KithClientError, match="does not look like Kith"),
    ):
        kith.create_gallery("g")  # this server is none
    assert len(script.asked) == 3


@pytest.mark.parametrize(
    ("answer", "attempts", "asked"),
    [
        (BUSY, 3, 3),
        (Answer(404, b"nothing here"), 3, 1),
        (Answer(504, b'{"code": "deadline_exceeded"}'), 3, 1),
        (Answer(429, b"", {"Retry-After": str(int(LONGEST_PAUSE_S) + 1)}), 3, 1),
    ],
    ids=str,
)
def test_it_ends_with_what_the_server_said(answer: Answer, attempts: int, asked: int) -> None:
    with answering(answer) as script, Kith(script.url, attempts=attempts) as kith:
        with pytest.raises(KithClientError) as raised:
            kith.ready()
        assert raised.value.status == answer.status
        assert len(script.asked) == asked


def test_how_long_one_is_told_to_wait() -> None:
    assert retry_after_s(None) == 0
    assert retry_after_s("17") == 17
    assert retry_after_s("soon") == 0
    at = datetime.now(UTC) + timedelta(seconds=90)
    assert retry_after_s(format_datetime(at, usegmt=True)) == pytest.approx(90, abs=5)
    assert retry_after_s(format_datetime(at - timedelta(days=1))) == 0


def test_an_answer_that_does_not_come_in_time_is_none() -> None:
    late = Answer(late=True)
    with answering(late, OK) as script, Kith(script.url, timeout_s=0.1) as kith:
        assert kith.ready().status == "ok"
        assert len(script.asked) == 2
    with (
        answering(late) as script,
        Kith(script.url, timeout_s=0.1, attempts=2) as kith,
        pytest.raises(KithUnreachableError, match="timed out"),
    ):
        kith.ready()


def test_nobody_is_there() -> None:
    with Kith("http://127.0.0.1:9", attempts=2) as kith:
        for ask in (kith.ready, lambda: kith.create_gallery("g")):
            with pytest.raises(KithUnreachableError, match="Is a server running there") as raised:
                ask()
            assert not raised.value.maybe_done


def test_an_export_that_breaks_off_is_not_a_shorter_one() -> None:
    cut = Answer(body=b"{}", headers={"Content-Length": "100", "Connection": "close"})
    with answering(BUSY, cut) as script, Kith(script.url) as kith:
        pieces = kith.export_gallery("g")
        assert next(pieces) == b"{}"
        script.answers[0] = BROKEN
        with pytest.raises(KithUnreachableError):
            list(pieces)


def test_a_key_that_asks_too_often_is_held_up_not_refused(tmp_path: Path) -> None:
    """By a real server: a request a second, and one at once."""
    operator = "of the tests, and long enough for one"
    settings = load_settings(data_dir=tmp_path, api_key=operator, log_level="ERROR")
    with embedded(settings) as url, Kith(url, operator) as kith:
        token = kith.create_key("door", ["read"], rate=1.0, burst=1).token
        with Kith(url, token) as limited:
            before = time.monotonic()
            assert [limited.model().model for _ in range(3)] == [kith.model().model] * 3
            assert time.monotonic() - before > 1.5
        with Kith(url, token, attempts=1) as hasty, pytest.raises(KithClientError, match="rate_limited"):
            hasty.model()


def test_an_enrolment_outlives_the_server_and_happens_once(tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    """The server is killed while it is asked, and another started in its place."""
    server = Server(tmp_path)
    server.wait_until_ready()
    try:
        with server.client(attempts=1) as kith:
            kith.create_gallery("g")
        asking = threading.Event()

        def enrol() -> None:
            with Kith(server.url, attempts=12) as client:
                for number in range(4):
                    asking.set()
                    done.append(client.enrol("g", f"ada-{number}", jpeg(astronaut), allow_duplicate=True))

        done: list[Any] = []
        thread = threading.Thread(target=enrol)
        thread.start()
        asking.wait(30)
        server.kill()
        server.launch()
        thread.join(90)
        assert [len(answer.results) for answer in done] == [1] * 4
        with server.client(attempts=4) as kith:
            assert {subject.id: subject.templates for subject in kith.subjects("g")} == {
                f"ada-{n}": 1 for n in range(4)
            }
    finally:
        server.kill()


# Awaited


def test_the_whole_way_awaited(
    server: str, astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], tmp_path: Path
) -> None:
    async def work() -> None:
        async with AsyncKith(server) as kith:
            await kith.create_gallery("awaited")
            people: dict[str, Photo] = {"ada": jpeg(astronaut), "tom": actor}
            await asyncio.gather(*(kith.enrol("awaited", name, photo) for name, photo in people.items()))
            (found,) = (await kith.identify("awaited", astronaut)).results
            assert (found.outcome, found.subject) == ("identified", "ada")
            assert {subject.id async for subject in kith.subjects("awaited")} == {"ada", "tom"}
            file = tmp_path / "g.ndjson"
            file.write_bytes(b"".join([piece async for piece in kith.export_gallery("awaited")]))
            sent: list[int] = []
            taken = await kith.import_gallery("copy", file, create=True, progress=sent.append)
            assert (taken.templates, sum(sent)) == (2, file.stat().st_size)
            assert {"awaited", "copy"} <= await kith.gallery_names()
            with pytest.raises(KithClientError, match="gallery_not_found"):
                await kith.gallery("nothing")
            for name in ("awaited", "copy"):
                await kith.delete_gallery(name)

    run(work())


def test_an_archive_awaited(server: str, astronaut: NDArray[np.uint8], tmp_path: Path) -> None:
    archive = tmp_path / "people.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ada/1.jpg", jpeg(astronaut))

    async def work() -> None:
        async with AsyncKith(server) as kith:
            await kith.create_gallery("archive-awaited")
            job = await kith.wait_for((await kith.enrol_archive("archive-awaited", archive)).id, 60)
            assert (job.state, job.counts) == ("succeeded", {"enrolled": 1})
            await kith.delete_gallery("archive-awaited")

    run(work())


def test_a_call_that_is_cancelled_lets_the_server_go() -> None:
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

        run(work())
    assert len(script.asked) == 2


def test_many_at_once_wait_for_a_connection_not_for_an_error(server: str) -> None:
    async def work() -> None:
        async with AsyncKith(server, connections=4, timeout_s=5) as kith:
            answers = await asyncio.gather(*(kith.health() for _ in range(300)))
            assert {answer.status for answer in answers} == {"ok"}

    run(work())


def test_what_is_repeated_is_so_awaited_too() -> None:
    with answering(BROKEN, BUSY, LIMITED, ENROLLED, BROKEN) as script:

        async def work() -> None:
            async with AsyncKith(script.url) as kith:
                assert (await kith.enrol("g", "ada", b"photo")).subject == "ada"
                with pytest.raises(KithUnreachableError) as raised:
                    await kith.create_key("door", ["read"])
                assert raised.value.maybe_done

        run(work())
    assert len(script.asked) == 5


# What cannot be addressed


OF_A_PATH = ("gallery", "subject", "template", "job", "key", "receipt", "name")
"""Parameters that stand in addresses; ``name``: of calls of galleries."""
UNADDRESSABLE = ["", ".", "..", "g/subjects/p", "/", "..\\", "a\\b", "a\nb", "a\0", "\x1b[2J", "a\x85", "\ud800"]


def naming(describe: Callable[..., Any]) -> list[str]:
    made_anew = describe in (calls.create_gallery, calls.create_key, calls.put_subject)
    asked = inspect.signature(describe).parameters
    in_query = {calls.jobs: {"gallery"}, calls.erasures: {"subject"}}.get(describe, set())
    return [name for name in OF_A_PATH if name in asked and name not in in_query and not (made_anew and name == "name")]


@pytest.mark.parametrize("value", UNADDRESSABLE)
def test_no_call_sends_what_would_be_another_address(value: str) -> None:
    """Normalised, '..' is the gallery that holds the subject."""
    refused = 0
    for describe in DESCRIBED.values():
        for name in naming(describe):
            needed = {
                parameter.name: SAMPLES.get(parameter.name, "x")
                for parameter in inspect.signature(describe).parameters.values()
                if parameter.default is parameter.empty
                and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            }
            if describe is calls.audit:  # by place alone
                given: tuple[tuple[Any, ...], dict[str, Any]] = (value,), {}
            else:
                given = (), needed | {name: value}
            with pytest.raises(KithClientError) as refusal:
                made = describe(*given[0], **given[1])
                made.page(None) if isinstance(made, Pages) else made
            assert (refusal.value.code, refusal.value.status) == ("invalid_request", 0), (describe, name)
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("value", ["..", "g/subjects/p"])
def test_neither_client_sends_it(value: str) -> None:
    with answering(OK) as script:
        with Kith(script.url) as kith, pytest.raises(KithClientError, match="invalid_request"):
            kith.delete_subject("g", value)

        async def erased() -> None:
            async with AsyncKith(script.url) as kith:
                await kith.delete_subject("g", value)

        with pytest.raises(KithClientError, match="invalid_request"):
            run(erased())
    assert script.asked == []


@pytest.mark.parametrize("subject", ["...", "%2e%2e", "%2F", "a?b#c", "a b+c", "ada;x=1", "Zoë 李", "~", "-rf", ":"])
def test_odd_ids_are_one_part_of_an_address(kith: Kith, gallery: str, subject: str) -> None:
    kith.put_subject(gallery, "other")
    assert kith.put_subject(gallery, subject).id == subject
    assert kith.delete_subject(gallery, subject).subjects == 1
    assert [left.id for left in kith.subjects(gallery)] == ["other"]
