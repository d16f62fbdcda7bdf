"""Generated requests, valid and invalid: responses are never 5xx and match the OpenAPI document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx2 as httpx
import hypothesis
import jsonschema_rs
import numpy as np
import orjson
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from numpy.typing import NDArray
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kith import Kith
from kith.wire.faces import FacesOut
from kith.wire.fields import TIMESTAMP, rfc3339
from kith.wire.identification import IdentifyOut
from kith.wire.subjects import EnrollOut
from kith.wire.verification import VerifyOut
from models.vision.recognition import Recognizer
from service.api.http.problems import MEDIA_TYPE, PATTERN_MESSAGES
from service.app import create_app
from service.core.errors import all_errors
from service.server import embedded
from service.settings import Settings, load_settings
from service.usecases import documents as responses
from tests.conftest import jpeg

KEY = "operator" * 4
STATUS = {error.code: error.status for error in all_errors()}
EXAMPLES = int(os.environ.get("KITH_EXAMPLES", "1"))
"""Number of valid and of invalid requests per route."""
OTHER_NUMBERS = {
    "dimension",
    "embedding",
    "height",
    "image",
    "item",
    "line",
    "number",
    "other_face",
    "position",
    "sequence",
    "status",
    "top_k",
    "width",
}
"""Positions, sizes, limits and codes."""
UNITS = ("_count", "_days", "_bytes", "_s")
UNPAGED = {
    "/v1/galleries/{gallery}/albums",
    "/v1/galleries/{gallery}/migrate",
    "/v1/galleries/{gallery}/risk",
    "/v1/galleries/{gallery}/subjects/{subject}/decoys",
    "/v1/models",
    "/v1/status",
    "/v1/webhooks",
}
"""Responses without pages: settings, constants or the request bound their length."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="ERROR", api_key=KEY)


@pytest.fixture(scope="module")
def document(own_settings: Settings) -> dict[str, Any]:
    return create_app(own_settings).openapi()


def resolved(document: dict[str, Any], schema: Any) -> Any:
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def fields(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield schema, field and each of the field's types."""
    for name, schema in document["components"]["schemas"].items():
        for field, value in schema.get("properties", {}).items():
            for kind in value.get("anyOf", [value]):
                yield name, field, kind


@pytest.fixture(scope="module")
def service(own_settings: Settings) -> Iterator[tuple[requests.Session, str]]:
    with embedded(own_settings) as url, requests.Session() as session:
        # The server shares this process and closes idle connections late while requests are generated.
        session.headers.update({"X-API-Key": KEY, "Connection": "close"})
        yield session, url


@schemathesis.serializer("application/x-ndjson")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def test_problems_are_documented_as_such(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            statuses = operation["responses"].keys()
            assert all(status == "default" or int(status) < 400 for status in statuses)
            assert operation["responses"]["default"]["content"] == {
                MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}
            }


def test_operations_are_ready_for_generators(document: dict[str, Any]) -> None:
    """Each has a short unique name, a described tag, a description, and valid examples of its body."""
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert {"identify", "createGallery", "listSubjects", "getStatus"} <= {*names}
    assert len({*names}) == len(names)
    described = {tag["name"] for tag in document["tags"] if tag["description"]}
    for operation in operations:
        name = operation["operationId"]
        assert re.fullmatch(r"[a-z]+([A-Z][a-z]+){0,3}", name), name
        assert {*operation["tags"]} <= described, name
        assert len(operation["description"]) > 10, name
        paths = [each for each in operation.get("parameters", ()) if each["in"] == "path"]
        assert all(jsonschema_rs.is_valid(each["schema"], each["schema"]["examples"][0]) for each in paths), name
        if (body := operation.get("requestBody", {}).get("content", {}).get("application/json")) is not None:
            schema = body["schema"] | {"components": document["components"]}
            jsonschema_rs.validate(schema, body["example"])


def test_keys_are_documented(document: dict[str, Any]) -> None:
    kinds = document["components"]["securitySchemes"]
    assert {name for each in document["security"] for name in each} == kinds.keys()
    assert [kind["type"] for kind in kinds.values()] == ["http", "apiKey"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
def test_every_response_is_as_documented(
    document: dict[str, Any], service: tuple[requests.Session, str], mode: GenerationMode
) -> None:
    session, url = service
    # Generated keys would all be rejected.
    document = {name: part for name, part in document.items() if name != "security"}
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        # Includes routes that delete.
        session.post(f"{url}/v1/galleries", json={"name": "g"})
        session.put(f"{url}/v1/galleries/g/subjects/a", json={"name": "Ada", "tags": ["staff"]})
        settings = hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

        @settings
        @hypothesis.given(operation.as_strategy(generation_mode=mode), hypothesis.strategies.booleans())
        def ask(case: schemathesis.Case[Any], there: bool) -> None:
            if there:
                known = {"gallery": "g", "subject": "a"}
                case.path_parameters = {k: known.get(k, v) for k, v in (case.path_parameters or {}).items()}
            response = case.call(base_url=url, session=session)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400:
                assert STATUS[response.json()["code"]] == response.status_code, case.operation.label

        try:
            ask()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, operation.label  # every value is valid


def test_every_pattern_has_a_message(document: dict[str, Any]) -> None:
    """Errors show the message instead of the pattern."""

    def patterns(part: Any) -> Iterator[str]:
        match part:
            case dict():
                if isinstance(pattern := part.get("pattern"), str):
                    yield pattern
                for each in part.values():
                    yield from patterns(each)
            case list():
                for each in part:
                    yield from patterns(each)

    found = set(patterns(document)) - {TIMESTAMP}  # only of answers
    assert len(found) > 3
    assert found <= PATTERN_MESSAGES.keys()


def test_every_list_has_pages_and_every_list_of_a_request_a_bound(document: dict[str, Any]) -> None:
    lists, unbounded, seen = set(), [], set[str]()

    def walk(node: Any, where: str) -> None:
        if isinstance(node, list):
            for each in node:
                walk(each, where)
        elif isinstance(node, dict):
            if node.get("type") == "array" and "maxItems" not in node and "binary" not in str(node):
                unbounded.append(where)
            if (name := node.get("$ref", "").rpartition("/")[2]) and name not in seen:
                seen.add(name)
                walk(resolved(document, node), name)
            for key, value in node.items():
                walk(value, f"{where}.{key}")

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            walk([operation.get("requestBody"), operation.get("parameters")], f"{method} {path}")
        answer = operations.get("get", {}).get("responses", {}).get("200", {})
        schema = resolved(document, answer.get("content", {}).get("application/json", {}).get("schema", {}))
        listed = [resolved(document, each) for each in schema.get("properties", {}).values()]
        items = [each["items"] for each in listed if each.get("type") == "array" and "items" in each]
        # Lists of strings, such as tags, need no pages.
        if path in UNPAGED or not any(resolved(document, item).get("type") == "object" for item in items):
            continue
        lists.add(path.rpartition("/")[2])
        assert {"cursor", "limit"} <= {parameter["name"] for parameter in operations["get"]["parameters"]}, path
        assert "next" in schema["properties"], path
    assert lists >= {"galleries", "subjects", "templates", "strangers", "hygiene", "groups", "faces", "jobs", "audit"}
    assert {"IdentifyIn", "SubjectIn", "KeyIn"} <= seen
    assert not unbounded


def test_numbers_of_things_end_in_count_and_times_have_one_form(document: dict[str, Any]) -> None:
    numbers = {(name, field) for name, field, kind in fields(document) if kind.get("type") == "integer"}
    assert len(numbers) > 60
    assert [each for each in numbers if not each[1].endswith(UNITS) and each[1] not in OTHER_NUMBERS] == []
    by_kind = {
        field
        for _, field, kind in fields(document)
        if isinstance(each := kind.get("additionalProperties"), dict) and each.get("type") == "integer"
    }
    assert len(by_kind) > 4
    assert {field for field in by_kind if not field.endswith("counts")} == {"removed"}, "of a receipt"
    times = [(name, field, kind) for name, field, kind in fields(document) if kind.get("format") == "date-time"]
    answers = [each for each in times if not each[0].endswith("In")]
    assert len(answers) > 25
    assert [(name, field) for name, field, kind in answers if kind.get("pattern") != TIMESTAMP] == []


def test_times_are_in_utc_with_microseconds_also_in_exports(
    kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    assert rfc3339(datetime(2026, 1, 31, 12, 0, tzinfo=east)) == "2026-01-31T06:30:00.000000Z"
    assert rfc3339(datetime(1, 1, 1, 0, 0, 0, 7, UTC)) == "0001-01-01T00:00:00.000007Z"
    kith.update_gallery(gallery, keep_crops=True, remember_strangers_days=30)
    stranger = kith.identify(gallery, jpeg(astronaut), faces="largest").results[0].stranger
    kith.enroll(gallery, "ada", jpeg(astronaut), face="largest")
    kith.put_subject(gallery, "gone")
    kith.delete_subject(gallery, "gone")
    assert stranger is not None
    exports = (kith.export_subject(gallery, "ada"), kith.export_subject(gallery, "gone"))
    text = json.dumps([*exports, kith.export_stranger(gallery, stranger.id)])
    text += b"".join(kith.export_gallery(gallery)).decode()
    times = re.findall(r'"(\d{4}-\d\d-\d\d[T ]\d\d:[^"]*)"', text)
    assert len(times) > 10
    assert [time for time in times if not re.fullmatch(TIMESTAMP, time)] == []


Photo = NDArray[np.uint8]


def fits(model: type[BaseModel], response: httpx.Response) -> dict[str, Any]:
    """Return the document after checking that it equals its model without nulls."""
    assert response.is_success, response.text
    document: dict[str, Any] = response.json()
    assert model.model_validate_json(response.content, strict=True).model_dump(exclude_none=True) == document
    return document


def post(url: str, *photos: bytes, **options: Any) -> httpx.Response:
    files = [("images", ("photo", photo)) for photo in photos]
    return httpx.post(url, files=files, data={"request": orjson.dumps(options).decode()})


def test_each_document_fits_its_model(
    server: str, kith: Kith, gallery: str, astronaut: Photo, group: Photo, nobody: Photo
) -> None:
    home, people = f"{server}/v1/galleries/{gallery}", (jpeg(group), jpeg(nobody), b"no photo")
    for route in ("detect", "embed"):
        seen, none, bad = fits(FacesOut, post(f"{server}/v1/{route}", *people))["images"]
        assert len(seen["faces"]) == 6
        assert ("embedding" in seen["faces"][0]) == (route == "embed")
        assert (none["faces"], bad["error"]["code"]) == ([], "image_format")
    empty = fits(IdentifyOut, post(f"{home}/identify", jpeg(astronaut)))
    assert empty["results"][0]["outcome"] == "unknown"
    kith.put_subject(gallery, "eileen", name="Eileen Collins")
    enrolled = fits(EnrollOut, post(f"{home}/subjects/eileen/templates", jpeg(astronaut), jpeg(group), b"no photo"))
    assert enrolled["enrolled_count"] == 1
    errors = [result.get("error", {}).get("code") for result in enrolled["results"]]
    assert errors == [None, "several_faces", "image_format"]
    vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
    photos = (jpeg(astronaut), *people, jpeg((astronaut * 0.12).astype(np.uint8)))
    found = fits(IdentifyOut, post(f"{home}/identify", *photos, embeddings=[vector], risk={"fpir": 0.001}))["results"]
    outcomes = {result["outcome"] for result in found}
    assert outcomes == {"identified", "unknown", "no_face", "rejected_quality", "error"}
    assert (found[0]["name"], found[-1]["embedding"]) == ("Eileen Collins", 0)

    def verified(*photos: bytes, **options: Any) -> dict[str, Any]:
        files = {side: ("photo", photo) for side, photo in zip("ab", photos, strict=False)}
        data = {"request": orjson.dumps(options).decode()}
        return fits(VerifyOut, httpx.post(f"{server}/v1/verify", files=files, data=data))

    assert verified(jpeg(astronaut), jpeg(astronaut))["outcome"] == "same"
    subject = {"subject": {"gallery": gallery, "subject": "eileen"}}
    one = verified(jpeg(astronaut), b=subject, risk={"threshold": 0.5})
    assert (one["b"], one["risk"]["source"]) == ({}, "explicit")
    none = verified(jpeg(astronaut), jpeg(nobody))
    assert (none["outcome"], none["reasons"], "similarity" in none) == ("no_face", ["b: no_face"], False)


def test_an_encoded_embedding_decodes_to_the_same_float32(
    kith: Kith, recognizer: Recognizer, rng: np.random.Generator
) -> None:
    """The encoding uses fewer digits than a double has."""
    vector = rng.normal(size=recognizer.dimension).astype(np.float32)
    written = responses.encode_json({"embedding": vector})
    assert np.array_equal(np.array(orjson.loads(written)["embedding"], np.float32), vector)
    assert len(written) < len(orjson.dumps({"embedding": [float(v) for v in vector]}))
