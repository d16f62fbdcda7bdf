"""API reference page: self-contained, with an OpenAPI document that its viewer supports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from service.api.routes.static import to_openapi_3_0


def test_the_page_and_its_files_need_neither_a_key_nor_another_server(stranger: httpx.Client) -> None:
    page = stranger.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        assert path.startswith(("console/", "docs/")), path
        answer = stranger.get(path)
        assert answer.status_code == 200, path
        assert answer.content, path
    assert "<script>" not in page.text


def test_swagger_ui_gets_openapi_3_0(stranger: httpx.Client) -> None:
    newest, older = stranger.get("/openapi.json").json(), stranger.get("/docs/openapi.json").json()
    assert (newest["openapi"][:3], older["openapi"]) == ("3.1", "3.0.3")
    assert older["paths"].keys() == newest["paths"].keys()
    assert older["components"]["schemas"].keys() == newest["components"]["schemas"].keys()
    later = [schema for schema in _dicts(older["components"]["schemas"]) if _is_later(schema)]
    assert later == []


def _dicts(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _dicts(each)


def _is_later(schema: dict[str, Any]) -> bool:
    """Return True if the schema uses a keyword that OpenAPI 3.0 lacks."""
    numbers = [schema.get(name) for name in ("exclusiveMinimum", "exclusiveMaximum")]
    return (
        schema.get("type") == "null"
        or isinstance(schema.get("const"), str)
        or isinstance(schema.get("examples"), list)
        or any(type(number) in (int, float) for number in numbers)
    )


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "title": "N"},
         {"type": "string", "maxLength": 3, "title": "N", "nullable": True}),
        ({"anyOf": [{"$ref": "#/a"}, {"type": "null"}]}, {"anyOf": [{"$ref": "#/a"}], "nullable": True}),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, {"anyOf": [{"type": "number"}, {"type": "string"}]}),
        ({"type": "string", "const": "ok"}, {"type": "string", "enum": ["ok"]}),
        ({"type": "number", "exclusiveMaximum": 1, "minimum": 0},
         {"type": "number", "maximum": 1, "exclusiveMaximum": True, "minimum": 0}),
        ({"type": "string", "examples": ["a", "b"]}, {"type": "string", "example": "a"}),
    ],
)  # fmt: skip
def test_openapi_3_1_is_converted_to_3_0(later: dict[str, Any], earlier: dict[str, Any]) -> None:
    assert to_openapi_3_0(later) == earlier
