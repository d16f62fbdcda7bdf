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
from service.api.http.problems import MEDIA_TYPE
from service.app import create_app
from service.core.errors import all_errors
from service.server import embedded
from service.settings import Settings, load_settings
from tests.conftest import jpeg

KEY = "operator" * 4
STATUS = {error.code: error.status for error in all_errors()}
EXAMPLES = int(os.environ.get("KITH_EXAMPLES", "1"))
"""Number of valid and of invalid requests per route."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="ERROR", api_key=KEY)


@pytest.fixture(scope="module")
def document(own_settings: Settings) -> dict[str, Any]:
    return create_app(own_settings).openapi()


@pytest.fixture(scope="module")
def service(own_settings: Settings) -> Iterator[tuple[requests.Session, str]]:
    with embedded(own_settings) as url, requests.Session() as session:
        # The server shares this process and closes idle connections late while requests are generated.
        session.headers.update({"X-API-Key": KEY, "Connection": "close"})
        yield session, url


@schemathesis.serializer("application/x-ndjson")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def test_operations_are_ready_for_generators(document: dict[str, Any]) -> None:
    """Each has a unique name, problems, and valid examples of its path and body."""
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert {"identify", "createGallery", "listSubjects", "getStatus"} <= {*names}
    assert len({*names}) == len(names)
    problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for operation in operations:
        name = operation["operationId"]
        assert all(status == "default" or int(status) < 400 for status in operation["responses"]), name
        assert operation["responses"]["default"]["content"] == problem, name
        paths = [each for each in operation.get("parameters", ()) if each["in"] == "path"]
        assert all(jsonschema_rs.is_valid(each["schema"], each["schema"]["examples"][0]) for each in paths), name
        if (body := operation.get("requestBody", {}).get("content", {}).get("application/json")) is not None:
            schema = body["schema"] | {"components": document["components"]}
            jsonschema_rs.validate(schema, body["example"])
    kinds = document["components"]["securitySchemes"]
    assert {name for each in document["security"] for name in each} == kinds.keys()


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
            patience_s = 0.5 if case.operation.path == "/v1/events" else 60  # a stream has no end
            response = case.call(base_url=url, session=session, timeout=patience_s)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400:
                assert STATUS[response.json()["code"]] == response.status_code, case.operation.label

        try:
            ask()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, operation.label  # every value is valid


def test_every_list_of_a_request_has_a_bound(document: dict[str, Any]) -> None:
    unbounded, seen = [], set[str]()

    def walk(node: Any, where: str) -> None:
        if isinstance(node, list):
            for each in node:
                walk(each, where)
        elif isinstance(node, dict):
            if node.get("type") == "array" and "maxItems" not in node and "binary" not in str(node):
                unbounded.append(where)
            if (name := node.get("$ref", "").rpartition("/")[2]) and name not in seen:
                seen.add(name)
                walk(document["components"]["schemas"][name], name)
            for key, value in node.items():
                walk(value, f"{where}.{key}")

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            walk([operation.get("requestBody"), operation.get("parameters")], f"{method} {path}")
    assert {"IdentifyIn", "SubjectIn", "KeyIn"} <= seen
    assert not unbounded


def test_times_are_in_utc_with_microseconds_also_in_exports(
    document: dict[str, Any], kith: Kith, gallery: str, astronaut: NDArray[np.uint8]
) -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    assert rfc3339(datetime(2026, 1, 31, 12, 0, tzinfo=east)) == "2026-01-31T06:30:00.000000Z"
    assert rfc3339(datetime(1, 1, 1, 0, 0, 0, 7, UTC)) == "0001-01-01T00:00:00.000007Z"
    forms = {
        (name, kind.get("pattern"))
        for name, schema in document["components"]["schemas"].items()
        for value in schema.get("properties", {}).values()
        for kind in value.get("anyOf", [value])
        if kind.get("format") == "date-time" and not name.endswith("In")
    }
    assert len(forms) > 10 and {pattern for _, pattern in forms} == {TIMESTAMP}
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
        assert ("embedding" in seen["faces"][0]) == (route == "embed")
        assert (none["faces"], bad["error"]["code"]) == ([], "image_format")
    fits(IdentifyOut, post(f"{home}/identify", jpeg(astronaut)))
    kith.put_subject(gallery, "eileen", name="Eileen Collins")
    enrolled = fits(EnrollOut, post(f"{home}/subjects/eileen/templates", jpeg(astronaut), *people[1:]))
    errors = [result.get("error", {}).get("code") for result in enrolled["results"]]
    assert errors == [None, "no_face", "image_format"]
    vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
    photos = (jpeg(astronaut), *people, jpeg((astronaut * 0.12).astype(np.uint8)))
    found = fits(IdentifyOut, post(f"{home}/identify", *photos, embeddings=[vector], risk={"fpir": 0.001}))["results"]
    outcomes = {result["outcome"] for result in found}
    assert outcomes == {"identified", "unknown", "no_face", "rejected_quality", "error"}
    assert (found[0]["name"], found[-1]["embedding"]) == ("Eileen Collins", 0)
    subject = {"subject": {"gallery": gallery, "subject": "eileen"}}
    for sides, options in (
        ({"a": jpeg(astronaut), "b": jpeg(astronaut)}, {}),
        ({"a": jpeg(astronaut)}, {"b": subject, "risk": {"threshold": 0.5}}),
        ({"a": jpeg(astronaut), "b": jpeg(nobody)}, {}),
    ):
        sent: dict[str, Any] = {"files": sides, "data": {"request": orjson.dumps(options).decode()}}
        verified = fits(VerifyOut, httpx.post(f"{server}/v1/verify", **sent))
        assert ("similarity" in verified) == (verified["outcome"] == "same")
