"""The OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kith.wire.common import Problem
from service.api.http.problems import MEDIA_TYPE
from service.api.http.routing import Description

REFERENCE: Final = "#/components/schemas/{model}"
PATH_EXAMPLES: Final = {  # an optional help for readers; generators make values from the pattern
    "gallery": "staff",
    "subject": "ada",
    "other": "grace",
    "stranger": "c1f7a3d95b0e4c6f8a2d7e9b3f5a1c08",
    "album": "72c098051f698623421f8da33dba3ec0",
    "group": "g1",
    "template": "49a823bbf76b622b1ddbef8c1f735e93",
    "decoy": "b09d6f1e2c5a4a7c8e3f0d1b2a3c4d5e",
    "webhook": "6b1f2d0c5e7a4f0d9c3b8a7e6d5c4b3a",
    "job": "72c098051f698623421f8da33dba3ec0",
    "receipt": "5a8c0d7be1a94e0c9a4f5a7be03c6d21",
    "key": "0f3b2a9c41de",
}
TAGS: list[dict[str, Any]] = [
    {"name": "identify", "description": "Search a gallery for the faces in photos (1:N)."},
    {"name": "faces", "description": "Detect, embed and compare faces (1:1). Nothing is stored."},
    {"name": "galleries", "description": "Galleries: sets of people that one search covers."},
    {"name": "subjects", "description": "Enrolled people and their templates."},
    {"name": "strangers", "description": "Unknown people that a gallery remembers."},
    {"name": "albums", "description": "Uploaded photos without names, grouped into people."},
    {"name": "risk", "description": "Thresholds of a gallery and their evidence."},
    {"name": "jobs", "description": "Work in the background: bulk enrollment, migration, imports."},
    {"name": "migration", "description": "Change of a gallery's recognizer."},
    {"name": "transfer", "description": "Export and import of galleries."},
    {"name": "erasures", "description": "Receipts of erasures, and all data about a subject."},
    {"name": "audit", "description": "Entries of the chained audit log."},
    {"name": "keys", "description": "API keys."},
    {"name": "webhooks", "description": "Receivers of events, and where each one is."},
    {"name": "events", "description": "Events as they happen."},
    {"name": "system", "description": "Health, status, models and metrics of one process."},
]


def _body_schemas(routes: Sequence[Description]) -> dict[str, Any]:
    """Return the schemas of bodies with photos, which are not in any route's signature."""
    schemas: dict[str, Any] = {}
    for model in [route.photos for route in routes if route.photos]:
        schema = model.model_json_schema(ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    return schemas


def _describe_defaults(schema: dict[str, Any]) -> None:
    """Move a request's defaults to its descriptions: generators turn a field with a default into a required one."""
    for field in schema.get("properties", {}).values():
        default = field.pop("default", None)
        if default is not None:
            field["description"] = f"{field.get('description', '')} Default: {json.dumps(default)}.".lstrip()


def install_openapi(app: FastAPI, routes: Sequence[Description]) -> None:
    """Add to the OpenAPI document what signatures lack: body schemas, examples, problem types and authentication."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                routes=app.routes,
                tags=app.openapi_tags,
                servers=[{"url": "."}],  # relative to /openapi.json, because a proxy may add a path prefix
            )
            _complete(document, routes)
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
            document["security"] = [{"bearer": []}, {"header": []}, {}]  # {}: a server without keys
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], routes: Sequence[Description]) -> None:
    schemas = document["components"]["schemas"]
    schemas |= _body_schemas(routes)
    schemas["Problem"] = Problem.model_json_schema(ref_template=REFERENCE, mode="serialization")
    for name, each in schemas.items():
        if name.endswith(("In", "Patch", "Problem")):
            _describe_defaults(each)
    schema = {"$ref": REFERENCE.format(model="Problem")}
    for route in routes:
        if route.example and (operation := document["paths"].get(route.path, {}).get(route.method.lower())):
            operation["requestBody"]["content"]["application/json"]["example"] = route.example
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and (example := PATH_EXAMPLES.get(parameter["name"])) is not None:
                    parameter["example"] = example
            for response in operation["responses"].values():
                if "x-codes" in response:
                    response["content"] = {MEDIA_TYPE: {"schema": schema}}
