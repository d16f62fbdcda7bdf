"""Both clients offer every API operation, with every option, and never address another resource."""

from __future__ import annotations

import asyncio
import inspect
import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from kith.wire.keys import KeyIn
from kith.wire.risk import RiskIn
from kith.wire.subjects import EnrollIn, SubjectPatch
from kith.wire.verification import VerifyIn
from kith.wire.webhooks import WebhookIn
from tests.scripted import Answer, answering

CALLS: Any = SimpleNamespace(
    **{name: partial(method.describe, None) for name, method in vars(Calls).items() if isinstance(method, Method)}
)
"""Descriptions of the calls, by the names of the methods."""
DESCRIBED: dict[str, Callable[..., Any]] = vars(CALLS)
SAMPLES: dict[str, Any] = {
    "a": [0.5],
    "b": [0.5],
    "archive": __file__,
    "file": __file__,
    "scopes": ["read"],
    "faces": ["x"],
}
PATH_PARAMETERS = (
    "gallery",
    "subject",
    "template",
    "job",
    "key",
    "receipt",
    "stranger",
    "album",
    "group",
    "name",
)
"""Parameters that become path segments; ``name`` is a gallery's."""
INVALID_IDS = ["", ".", "..", "g/subjects/p", "/", "..\\", "a\\b", "a\nb", "a\0", "\x1b[2J", "a\x85", "\ud800"]


def test_both_clients_have_the_same_methods() -> None:
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
    assert inspect.signature(AsyncKith.identify).return_annotation == "IdentifyOut"
    assert [inspect.iscoroutinefunction(kind.identify) for kind in (Kith, AsyncKith)] == [False, True]


def test_every_api_operation_has_a_client_method(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json").json()
    operations = {
        (method.upper(), path): re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    reached = set()
    for name, describe in DESCRIBED.items():
        for call in build_calls(describe):
            found = [key for key, path in operations.items() if key[0] == call.method and path.fullmatch(call.path)]
            # A literal path also matches a path with a parameter, so the most specific one counts.
            assert found, f"{name}: {call.method} {call.path} is not an API operation"
            reached.add(min(found, key=lambda key: key[1].count("{")))
    assert operations.keys() - reached == set()


def needed(describe: Callable[..., Any]) -> dict[str, Any]:
    """Return sample arguments for the required parameters of a call."""
    return {
        name: SAMPLES.get(name, "x")
        for name, parameter in inspect.signature(describe).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def build_calls(describe: Callable[..., Any]) -> list[Call[Any]]:
    """Build the calls of a method from sample arguments; two for audit, with and without a gallery."""
    own = needed(describe)
    made = [describe(**own), *([describe(*own.values(), "x")] if describe is CALLS.audit else [])]
    return [one.page(None) if isinstance(one, Pages) else one for one in made]


@pytest.mark.parametrize(
    ("describe", "model", "elsewhere"),
    [
        (CALLS.embed, EmbedIn, {"images"}),
        (CALLS.identify, IdentifyIn, {"images"}),
        (CALLS.enroll, EnrollIn, {"images"}),
        (CALLS.verify, VerifyIn, set[str]()),
        (CALLS.create_key, KeyIn, set[str]()),
        (CALLS.create_webhook, WebhookIn, set[str]()),
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


def path_parameters(describe: Callable[..., Any]) -> list[str]:
    creates = describe in (CALLS.create_gallery, CALLS.create_key, CALLS.put_subject)
    asked = inspect.signature(describe).parameters
    elsewhere = {
        CALLS.jobs: {"gallery"},
        CALLS.erasures: {"subject"},
        CALLS.promote_stranger: {"subject", "name"},
        CALLS.enroll_album_group: {"subject", "name"},
        CALLS.audit: {"gallery", "subject"},
        CALLS.create_webhook: {"name"},
    }.get(describe, set())
    return [
        name for name in PATH_PARAMETERS if name in asked and name not in elsewhere and not (creates and name == "name")
    ]


@pytest.mark.parametrize("value", INVALID_IDS)
def test_an_id_that_would_change_the_path_is_refused(value: str) -> None:
    """Proxies and servers normalize '..' to the gallery, and the request would then erase it."""
    refused = 0
    for describe in DESCRIBED.values():
        for name in path_parameters(describe):
            with pytest.raises(KithClientError) as refusal:
                made = describe(**(needed(describe) | {name: value}))
                made.page(None) if isinstance(made, Pages) else made
            assert (refusal.value.code, refusal.value.status) == ("invalid_request", 0), (describe, name)
            refused += 1
    assert refused > 40


def test_one_text_is_not_sent_as_its_letters() -> None:
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
        with pytest.raises(ValueError, match="embeddings="):
            kith.identify("g", embeddings=[0.5, 0.5])  # type: ignore[list-item]


def test_a_list_or_stream_fails_where_it_is_asked_for() -> None:
    asks: list[Callable[[Any], object]] = [
        lambda kith: kith.subjects("..", q="a"),
        lambda kith: kith.subjects("g", q="\ud800"),
        lambda kith: kith.export_gallery(".."),
        lambda kith: kith.events(galleries=["\ud800"]),
    ]

    async def awaited(ask: Callable[[Any], object]) -> None:
        async with AsyncKith("http://127.0.0.1:9", attempts=1) as kith:
            ask(kith)

    for ask in asks:
        with Kith("http://127.0.0.1:9", attempts=1) as kith, pytest.raises(KithClientError, match="invalid_request"):
            ask(kith)
        with pytest.raises(KithClientError, match="invalid_request"):
            asyncio.run(awaited(ask))
    with Kith("http://127.0.0.1:9", attempts=1) as kith, pytest.raises(KithClientError, match="unreachable"):
        kith.galleries()
    refusal = Answer(401, b'{"code": "unauthorized"}')
    with answering(refusal) as script, Kith(script.url) as kith, pytest.raises(KithClientError, match="unauthorized"):
        kith.subjects("g")


def test_an_existing_gallery_is_returned_on_request(server: str, kith: Kith, gallery: str) -> None:
    there = kith.create_gallery(gallery, exist_ok=True, risk={"fpir": 0.5})
    assert there == kith.gallery(gallery)
    with pytest.raises(KithClientError, match="gallery_exists"):
        kith.create_gallery(gallery)

    async def awaited() -> str:
        async with AsyncKith(server) as client:
            return (await client.create_gallery(gallery, exist_ok=True)).name

    assert asyncio.run(awaited()) == gallery
    assert kith.create_gallery(f"{gallery}-new", exist_ok=True).name == f"{gallery}-new"
    kith.delete_gallery(f"{gallery}-new")


def test_all_photo_types_give_the_same_result(kith: Kith, astronaut: NDArray[np.uint8], tmp_path: Path) -> None:
    file, image = io.BytesIO(), Image.fromarray(astronaut)
    image.save(file, "PNG")
    path = tmp_path / "astronaut.png"
    path.write_bytes(file.getvalue())
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(astronaut)))
    turned.getexif()[0x0112] = 6  # orientation of a rotated camera
    with path.open("rb") as opened:
        given = (path, str(path), file.getvalue(), memoryview(file.getvalue()), opened, image, astronaut, turned)
        found = [kith.detect(photo).images[0] for photo in given]
    assert found[0].faces
    assert all(one == found[0] for one in found)
    gray = kith.detect(np.asarray(image.convert("L"))).images[0]
    assert gray == kith.detect(image.convert("L")).images[0]
    assert len(kith.detect(image.convert("CMYK"), *given[:2]).images) == 3


@pytest.mark.parametrize(
    ("photo", "said"),
    [
        (3, "int is not a photo"),
        (io.StringIO("text"), "open in text mode"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \(4, 4, 3\) is not a photo"),
        (np.zeros((4, 4), np.float32), "mode F is not a photo"),
        (np.zeros((4, 4, 7), np.uint8), "is not a photo"),
        ("https://cdn.example.org/ada.jpg", "urls="),
    ],
)
def test_an_invalid_photo_is_refused_with_the_reason(kith: Kith, photo: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        kith.detect(photo)


def test_an_embedding_is_a_list_of_floats_that_can_be_sent_again(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    seen = kith.embed(astronaut)
    vector = seen.images[0].faces[0].embedding
    assert vector is not None
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    kith.enroll(gallery, "ada", embeddings=[vector], recognizer=seen.recognizer)
    (found,) = kith.identify(gallery, embeddings=[vector]).results
    assert (found.subject, found.similarity) == ("ada", 1.0)
    assert kith.verify((gallery, "ada"), vector).outcome == "same"
    assert type(seen).model_validate_json(seen.model_dump_json()).images[0].faces[0].embedding == vector


def test_a_16_bit_gray_image_keeps_its_values() -> None:
    gray = np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)
    for photo in (gray, Image.fromarray(gray)):
        assert (np.asarray(Image.open(io.BytesIO(encode_photo(photo)))) == gray).all()


@pytest.mark.parametrize("mode", ["F", "I", "I;16B", "La", "RGBa"])
def test_an_image_mode_without_a_white_level_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode {mode} is not a photo: convert it"):
        encode_photo(Image.new(mode, (4, 4)))


def test_an_embedding_with_nan_is_refused() -> None:
    with Kith("http://127.0.0.1:9") as kith, pytest.raises(ValueError, match="NaN"):
        kith.identify("g", embeddings=[[float("nan"), 1.0]])
