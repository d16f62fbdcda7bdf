"""The OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from kith.wire.fields import Problem
from service.api.http.access import owners
from service.api.http.bodies import OPTIONS_FIELD, PHOTO_FIELDS, BodyOf, describe_defaults, plain_options

REFERENCE: Final = "#/components/schemas/{model}"
BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
PHOTO: Final = "/9j/4AAQSkZJRgABAQ... (base64)"
"""Stands for a photo in examples."""


def example(body: Any) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route whose JSON body is like ``body``."""
    return {"requestBody": {"content": {"application/json": {"example": body}}}}


def install_openapi(app: FastAPI) -> None:
    """Add to the OpenAPI document what signatures lack: bodies, problems, authentication."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                routes=app.routes,
                servers=[{"url": "."}],  # relative to /openapi.json, because a proxy may add a path prefix
            )
            schemas = document["components"]["schemas"]
            pages = {name: schema["title"] for name, schema in schemas.items() if name.startswith("Page_")}
            document = json.loads(re.sub("Page_[A-Za-z]+_", lambda name: pages[name[0]], json.dumps(document)))
            _complete(document, app)
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
            document["security"] = [{"bearer": []}, {"header": []}, {}]  # {}: a server without keys
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def bodies(app: FastAPI) -> list[tuple[APIRoute, BodyOf]]:
    """Return the routes with a body that is not streamed, each with the reader of its body."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [(route, owner) for route in routes for owner in owners(route) if isinstance(owner, BodyOf)]


def _complete(document: dict[str, Any], app: FastAPI) -> None:
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    described = [(route, body) for route, body in bodies(app) if route.include_in_schema]
    models = {body.model for _, body in described}
    inputs = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)[1].get("$defs", {})
    schemas |= inputs | {"Problem": Problem.model_json_schema(ref_template=REFERENCE, mode="serialization")}
    for name, each in schemas.items():
        if name.endswith(("In", "Patch", "Problem")):
            describe_defaults(each)
    for route, body in described:
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            request = operation.setdefault("requestBody", {})
            request["required"] = True
            content = request.setdefault("content", {})
            content.setdefault("application/json", {})["schema"] = {"$ref": REFERENCE.format(model=body.model.__name__)}
            if body.takes_photos:
                options = plain_options(body.model)
                content |= _photo_contents(body, options)
                operation.setdefault("parameters", []).extend(
                    {"name": name, "in": "query", "schema": schema, "description": "Only if the body is a photo."}
                    for name, schema in sorted(options.items())
                    if name in body.query_names
                )


def _photo_contents(body: BodyOf, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents beside JSON: a form, and one photo whose plain options are in the query."""
    photo, names = BINARY["schema"], PHOTO_FIELDS[body.is_verification]
    photos = dict.fromkeys(names, photo) if body.is_verification else {names[0]: {"type": "array", "items": photo}}
    rest = {"type": "string", "description": f"The other fields of {body.model.__name__}, as JSON."}
    properties = {**photos, **options, OPTIONS_FIELD: rest}
    form = {"multipart/form-data": {"schema": {"type": "object", "properties": properties}}}
    return form if body.is_verification else form | {"image/*": BINARY, "application/octet-stream": BINARY}
