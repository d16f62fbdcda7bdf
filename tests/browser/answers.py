"""Fields that the console reads from answers, compared with the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

SHARED: Final = {"id", "name", "subject"}
"""Of people in any answer: the console names them by the first of these that is there."""


def documented(document: dict[str, Any], method: str, path: str, fields: str) -> bool:
    """Return whether the successful answers of a request can have a field such as ``.data.quality.score``."""
    for template, operations in document["paths"].items():
        if re.search(re.sub(r"{\w+}", "[^/]+", template) + "$", path) and method.lower() in operations:
            answers = operations[method.lower()]["responses"]
            found = [
                content["schema"]
                for status, answer in answers.items()
                if status.startswith("2")
                for content in answer.get("content", {}).values()
            ]
            for name in fields.split(".")[1:]:
                found = [inner for schema in found for inner in inside(document, schema, name)]
            if found:
                return True
    return fields.rsplit(".", 1)[1] in SHARED


def inside(document: dict[str, Any], schema: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the schemas of a field of an object, or of the objects in an array."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    for part in (part for kind in ("anyOf", "oneOf", "allOf") for part in schema.get(kind, [])):
        yield from inside(document, part, name)
    if "items" in schema:
        yield from inside(document, schema["items"], name)
    if name in schema.get("properties", {}):
        yield schema["properties"][name]
    elif isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]
    elif schema.get("additionalProperties") is True:
        yield {"additionalProperties": True}
