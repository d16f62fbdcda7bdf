"""Both clients offer every API operation, with every option, and never address another resource."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import AsyncKith, Kith, KithClientError
from kith.calls import Calls
from kith.methods import Method
from kith.options import (
    FilterOptions,
    GalleryOptions,
    QualityGateOptions,
    Risk,
    SubjectChanges,
)
from kith.photos import encode_photo
from kith.requests import Call, Pages
from kith.wire.faces import EmbedIn
from kith.wire.galleries import GallerySettingsIn, QualityGateIn
from kith.wire.identification import FilterIn, IdentifyIn
from kith.wire.jobs import JobOut
from kith.wire.keys import KeyIn
from kith.wire.risk import RiskIn
from kith.wire.subjects import EnrollIn, SubjectPatch
from kith.wire.verification import VerifyIn
from kith.wire.webhooks import WebhookIn
from tests.scripted import WITH_BOTH, Answer, Kind, answering, ask
from tests.service.usecases.test_bulk_enrollment import Bytes, as_zip

DESCRIBED: dict[str, Callable[..., Any]] = {
    name: partial(method.describe, None) for name, method in vars(Calls).items() if isinstance(method, Method)
}
"""Descriptions of the calls, by the names of the methods."""
SAMPLES: dict[str, Any] = {
    "a": [0.5],
    "b": [0.5],
    "archive": __file__,
    "file": __file__,
    "scopes": ["read"],
    "faces": ["x"],
}
INVALID_IDS = ["", ".", "..", "g/subjects/p", "/", "..\\", "a\\b", "a\nb", "a\0", "\x1b[2J", "a\x85", "\ud800"]


def test_both_clients_have_the_same_methods() -> None:
    now, later = (
        {name: inspect.signature(getattr(kind, name)) for name in dir(kind) if not name.startswith("_")}
        for kind in (Kith, AsyncKith)
    )
    assert now.keys() == later.keys() == DESCRIBED.keys() | {"close", "gallery_names", "wait_for"}
    assert all(now[name].parameters == later[name].parameters for name in now)
    assert now["identify"].return_annotation == later["identify"].return_annotation == "IdentifyOut"
    assert now["galleries"].return_annotation == "Iterator[GalleryOut]"


def arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each method with sample arguments for its required parameters; audit also with a gallery."""
    for name, describe in DESCRIBED.items():
        yield (
            name,
            {
                parameter.name: SAMPLES.get(parameter.name, "x")
                for parameter in inspect.signature(describe).parameters.values()
                if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            },
        )
    yield "audit", {"name": "x"}


def build(name: str, given: dict[str, Any]) -> Call[Any]:
    made = DESCRIBED[name](**given)
    call: Call[Any] = made.page(None) if isinstance(made, Pages) else made
    return call


def test_every_api_operation_has_a_client_method(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json").json()
    operations = {
        (method.upper(), path): re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    reached = set()
    for name, given in arguments():
        call = build(name, given)
        found = [key for key, path in operations.items() if key[0] == call.method and path.fullmatch(call.path)]
        # A literal path also matches a path with a parameter, so the most specific one counts.
        assert found, f"{name}: {call.method} {call.path} is not an API operation"
        reached.add(min(found, key=lambda key: key[1].count("{")))
    assert operations.keys() - reached == set()


def test_calls_that_would_do_something_twice_are_not_repeatable() -> None:
    repeatable = {name: build(name, given).repeatable for name, given in arguments()}
    once = {"create_gallery", "create_key", "rotate_key", "create_webhook", "create_album", "roll_back"}
    assert [repeatable[name] for name in once] == [False] * 6
    assert [repeatable[name] for name in ("put_subject", "enroll", "enroll_archive", "identify")] == [True] * 4
    put = {"gallery": "g", "subject": "ada"}
    assert [build("put_subject", put | {"only_new": only_new}).repeatable for only_new in (False, True)] == [
        True,
        False,
    ]
    assert build("create_gallery", {"name": "g", "exist_ok": True}).repeatable


@pytest.mark.parametrize(
    ("describe", "model", "elsewhere"),
    [
        (DESCRIBED["embed"], EmbedIn, {"images"}),
        (DESCRIBED["identify"], IdentifyIn, {"images"}),
        (DESCRIBED["enroll"], EnrollIn, {"images"}),
        (DESCRIBED["verify"], VerifyIn, set[str]()),
        (DESCRIBED["create_key"], KeyIn, set[str]()),
        (DESCRIBED["create_webhook"], WebhookIn, set[str]()),
        (GalleryOptions, GallerySettingsIn, None),
        (QualityGateOptions, QualityGateIn, None),
        (SubjectChanges, SubjectPatch, None),
        (FilterOptions, FilterIn, None),
        (Risk, RiskIn, None),
    ],
)
def test_every_option_of_a_request_is_a_parameter(describe: Any, model: Any, elsewhere: set[str] | None) -> None:
    if elsewhere is None:
        assert describe.__annotations__.keys() == model.model_fields.keys()
    else:
        assert model.model_fields.keys() - elsewhere <= inspect.signature(describe).parameters.keys()


@pytest.mark.parametrize("value", INVALID_IDS)
def test_an_id_that_would_change_the_path_is_refused(value: str) -> None:
    """Proxies and servers normalize '..' to the gallery, and the request would then erase it."""
    refused = 0
    for name, given in arguments():
        for parameter in given:
            if given[parameter] == "x" and "MARK" in build(name, given | {parameter: "MARK"}).path:
                with pytest.raises(KithClientError) as refusal:
                    build(name, given | {parameter: value})
                assert (refusal.value.code, refusal.value.status) == ("invalid_request", 0), (name, parameter)
                refused += 1
    assert refused > 40


def test_one_text_is_not_sent_as_its_letters_and_no_number_as_an_embedding() -> None:
    with Kith("http://127.0.0.1:9") as kith:
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("tags", lambda: kith.put_subject("g", "ada", tags="engine")),
            ("tags", lambda: kith.subjects("g", tags="engine")),
            ("scopes", lambda: kith.create_key("door", "read")),  # type: ignore[arg-type]
            ("states", lambda: kith.jobs(states="queued")),  # type: ignore[arg-type]
            ("urls", lambda: kith.detect(urls="https://example.org/ada.jpg")),
        ]
        for argument, call in wrong:
            with pytest.raises(KithClientError, match=rf"{argument} is one text.*{argument}=\["):
                call()
        for vector, said in ((0.5, "embeddings="), ([float("nan"), 1.0], "NaN")):
            with pytest.raises(ValueError, match=said):
                kith.identify("g", embeddings=[vector])  # type: ignore[list-item]


def test_a_list_fails_where_it_is_asked_for() -> None:
    refusal = Answer(401, b'{"code": "unauthorized"}')
    with answering(refusal) as script, Kith(script.url) as kith, pytest.raises(KithClientError, match="unauthorized"):
        kith.subjects("g")


@WITH_BOTH
def test_an_existing_gallery_is_returned_on_request(kind: Kind, server: str, kith: Kith, gallery: str) -> None:
    there = ask(kind, server, lambda client: client.create_gallery(gallery, exist_ok=True, risk={"fpir": 0.5}))
    assert there == kith.gallery(gallery)
    with pytest.raises(KithClientError, match="gallery_exists"):
        kith.create_gallery(gallery)
    assert ask(kind, server, lambda client: client.create_gallery("new", exist_ok=True)).name == "new"
    kith.delete_gallery("new")
    assert gallery in ask(kind, server, lambda client: client.gallery_names())


@WITH_BOTH
def test_a_job_is_awaited(kind: Kind, kith: Kith, gallery: str) -> None:
    done, polled = kith.wait_for(kith.enroll_archive(gallery, Bytes(as_zip({"note.txt": b""}))).id), list[JobOut]()
    running = done.model_copy(update={"state": "running"})
    answers = [Answer(body=job.model_dump_json().encode()) for job in (running, running, done)]
    with answering(*answers) as script:
        assert ask(kind, script.url, lambda client: client.wait_for(done.id, 60, polled.append)) == done
    assert polled == [running, running, done]
    with answering(answers[0]) as script, pytest.raises(TimeoutError):
        ask(kind, script.url, lambda client: client.wait_for(done.id, 0.1))


def test_all_types_of_a_photo_have_the_same_pixels(astronaut: NDArray[np.uint8], tmp_path: Path) -> None:
    def pixels(photo: Any) -> NDArray[np.uint8]:
        return np.asarray(Image.open(io.BytesIO(encode_photo(photo))))

    image, path = Image.fromarray(astronaut), tmp_path / "astronaut.png"
    image.save(path)
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(astronaut)))
    turned.getexif()[0x0112] = 6  # orientation of a rotated camera
    with path.open("rb") as opened:
        for photo in (
            path,
            str(path),
            path.read_bytes(),
            memoryview(path.read_bytes()),
            opened,
            image,
            astronaut,
            turned,
        ):
            assert (pixels(photo) == astronaut).all()
    assert pixels(image.convert("CMYK")).shape == astronaut.shape
    for gray in (np.asarray(image.convert("L")), np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)):
        assert (pixels(gray) == gray).all()
        assert (pixels(Image.fromarray(gray)) == gray).all()


@pytest.mark.parametrize(
    ("photo", "said"),
    [
        (3, "int is not a photo"),
        (io.StringIO("text"), "open in text mode"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \(4, 4, 3\) is not a photo"),
        (np.zeros((4, 4, 7), np.uint8), "is not a photo"),
        ("https://cdn.example.org/ada.jpg", "urls="),
        *((Image.new(mode, (4, 4)), f"mode {mode} is not a photo: convert it") for mode in ("F", "I", "I;16B", "RGBa")),
    ],
)
def test_an_invalid_photo_is_refused_with_the_reason(photo: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        encode_photo(photo)
