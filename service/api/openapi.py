"""What OpenAPI says of bodies that are read by hand, with examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from service.api.problems import MEDIA_TYPE
from service.api.requests import OPTIONS
from service.api.schemas import DetectIn, EmbedIn, EnrolIn, IdentifyIn, Problem, VerifyIn

PHOTO = "/9j/4AAQSkZJRgABAQ... (base64)"
EXAMPLES: dict[type[BaseModel], Any] = {
    DetectIn: {"images": [PHOTO]},
    EmbedIn: {"images": [PHOTO]},
    IdentifyIn: {"images": [PHOTO], "risk": {"fpir": 0.001}, "top_k": 3, "filter": {"tags": ["staff"]}},
    EnrolIn: {"images": [PHOTO], "face": "largest"},
    VerifyIn: {
        "a": {"image": PHOTO},
        "b": {"subject": {"gallery": "staff", "subject": "ada"}},
        "risk": {"fmr": 0.001},
    },
}


def body_of(model: type[BaseModel], files: tuple[str, ...] = ("images",)) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that takes ``model`` as JSON or multipart, or, where its files are ``images``,
    one photo as it is with the other fields in the query."""
    binary = {"type": "string", "format": "binary"}
    parts: dict[str, Any] = {name: {"type": "array", "items": binary} if name == "images" else binary for name in files}
    parts[OPTIONS] = {"type": "string", "description": f"The other fields of {model.__name__}, as JSON."}
    content: dict[str, Any] = {
        "application/json": {
            "schema": {"$ref": f"#/components/schemas/{model.__name__}"},
            "example": EXAMPLES[model],
        },
        "multipart/form-data": {"schema": {"type": "object", "properties": parts}},
    }
    body = {"requestBody": {"required": True, "content": content}}
    if files != ("images",):
        return body
    content |= {"image/*": {"schema": binary}, "application/octet-stream": {"schema": binary}}
    options = {
        "name": OPTIONS,
        "in": "query",
        "schema": {"type": "string"},
        "description": f"Beside a photo that is the body itself: the other fields of {model.__name__}, as JSON.",
    }
    return {**body, "parameters": [options]}


def component_schemas() -> dict[str, Any]:
    """Schemas of the bodies that no route's signature names."""
    schemas: dict[str, Any] = {}
    for model in EXAMPLES:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    return schemas


def install(app: FastAPI) -> None:
    """Make the application's document say what no signature says: schemas of bodies, that problems are
    ``application/problem+json``, and how a key is shown."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            _complete(document)
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
            document["security"] = [{"bearer": []}, {"header": []}, {}]  # none: where the server has no keys
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> None:
    document["components"]["schemas"] |= component_schemas()
    schema = {"$ref": "#/components/schemas/Problem"}
    for operations in document["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own, which problems take the place of
            for status in PROBLEMS.keys() & responses.keys():
                responses[status]["content"] = {MEDIA_TYPE: {"schema": schema}}


PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "What was wrong and what to do, with a stable code."},
    "5XX": {"model": Problem, "description": "The service cannot answer now."},
}
