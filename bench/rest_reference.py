"""Writes docs/rest-reference.md: every route with the scope it needs, its parameters, bodies and answers, and every
schema, as the OpenAPI document and the table of permissions have them. A test compares: ``python -m
bench.rest_reference`` after either changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from bench.common import ROOT
from service.api.permissions import PERMISSIONS, Need
from service.app import create_app
from service.settings import load_settings

TARGET: Final = ROOT / "docs" / "rest-reference.md"
SCHEMAS: Final = "#/components/schemas/"
ABOUT: Final = """# REST reference

Every route and every schema. How they are used is in [rest.md](rest.md), by example; what may go wrong in
[errors.md](errors.md): every answer of status 4XX and 5XX is a [Problem](#problem). Written by `python -m
bench.rest_reference` out of the OpenAPI document, which a server gives at `/openapi.json` and shows at `/docs`.

A route says which scope its key needs ([keys.md](keys.md)). *All galleries*: not a key that is bound to some.
"""

Json = Mapping[str, Any]


def reference() -> str:
    """The page."""
    document: Json = create_app(load_settings(_env_file=None)).openapi()
    routes = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [ABOUT, "## Routes\n", *_overview(routes)]
    for tag in dict.fromkeys(_tag(operation) for *_, operation in routes):
        parts.append(f"## Routes: {tag}\n")
        parts += [_route(*route) for route in routes if _tag(route[2]) == tag]
    parts.append("## Schemas\n")
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _overview(routes: Iterable[tuple[str, str, Json]]) -> list[str]:
    lines = ["| Route | Scope | |", "|---|---|---|"]
    for method, path, operation in routes:
        first = operation.get("description", "").split(".")[0]
        lines.append(
            f"| [`{method} {path}`](#{_anchor(f'{method} {path}')}) | {_scope(method, path)} | {_cell(first)} |"
        )
    return [*lines, ""]


def _route(method: str, path: str, operation: Json) -> str:
    lines = [f"### `{method} {path}`", "", f"Scope: {_scope(method, path)}.", ""]
    if operation.get("description"):
        lines += [str(operation["description"]).strip(), ""]
    if parameters := operation.get("parameters"):
        lines += ["| Parameter | In | Type | Default | Meaning |", "|---|---|---|---|---|"]
        for each in parameters:
            schema = each["schema"]
            lines.append(
                f"| `{each['name']}` | {each['in']} | {_type(schema)} | "
                f"{'required' if each.get('required') else _default(schema)} | "
                f"{_cell(each.get('description') or schema.get('description') or '')} |"
            )
        lines.append("")
    if body := operation.get("requestBody"):
        lines += [f"Body{'' if body.get('required') else ' (may be left out)'}:", ""]
        for media, content in body["content"].items():
            schema = content.get("schema", {})
            named = _type(schema) if "$ref" in schema else _form(schema)
            lines.append(f"- `{media}`{f': {named}' if named else ''}")
            if "example" in content:
                lines += ["", "  ```json", f"  {json.dumps(content['example'])}", "  ```", ""]
        lines.append("")
    lines += ["Answers:", ""]
    for status, answer in operation["responses"].items():
        if not status.endswith("XX"):
            kinds = [
                f"`{media}` {_type(content.get('schema', {}))}".strip()
                for media, content in answer.get("content", {}).items()
            ]
            lines.append(f"- {status}: {', '.join(kinds) or 'nothing'}")
    return "\n".join([*lines, ""])


def _form(schema: Json) -> str:
    properties = schema.get("properties", {})
    return ", ".join(f"part `{name}`{_said(each)}" for name, each in properties.items())


def _said(schema: Json) -> str:
    return f" ({schema['description'].rstrip('.')})" if schema.get("description") else ""


def _schema(name: str, schema: Json) -> str:
    lines = [f"### {name}", ""]
    if schema.get("description"):
        lines += [" ".join(str(schema["description"]).split()), ""]
    if "properties" not in schema:
        return "\n".join([*lines, _type(schema) or "Anything.", ""])
    required = set(schema.get("required", ()))
    lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for field, each in schema["properties"].items():
        default = "required" if field in required else _default(each)
        lines.append(f"| `{field}` | {_type(each)} | {default} | {_cell(each.get('description', ''))} |")
    return "\n".join([*lines, ""])


def _type(schema: Json) -> str:
    """In words, with links to what has a section of its own."""
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(SCHEMAS)
        return f"[{name}](#{name.lower()})"
    if parts := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(dict.fromkeys(filter(None, (_type(part) for part in parts if part.get("type") != "null"))))
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return f"{schema.get('format', kind)}{_bounds(schema)}"


def _bounds(schema: Json) -> str:
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema]
    if "maxLength" in schema:
        said.append(f"≤ {schema['maxLength']} letters")
    return f" {', '.join(said)}" if said else ""


def _default(schema: Json) -> str:
    default = schema.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _scope(method: str, path: str) -> str:
    need = PERMISSIONS.get(f"{method} {path}", Need(keyless=True))
    if need.keyless:
        return "no key"
    if need.on_loopback:
        return "any key; none on loopback"
    words = "any key" if need.scope is None else f"`{need.scope}`"
    return f"{words}, all galleries" if need.all_galleries else words


def _tag(operation: Json) -> str:
    return str((operation.get("tags") or ["others"])[0])


def _anchor(heading: str) -> str:
    """As GitHub makes them."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
