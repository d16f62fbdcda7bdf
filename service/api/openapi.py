"""What OpenAPI says of bodies that are read by hand, with examples."""

from __future__ import annotations

from typing import Any

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


def complete(document: dict[str, Any]) -> None:
    """Add what no signature says: schemas of bodies, and that problems are ``application/problem+json``."""
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
