"""OpenAPI document, and the API reference by a local copy of Swagger UI."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from fastapi import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from swagger_ui_bundle import swagger_ui_path

from service.api.http.access import router
from service.api.routes.console import SECURITY_HEADERS as CONSOLE_HEADERS

routes = router()
SCHEMA: Final = "/openapi.json"
# Swagger UI needs inline styles and sanitizes its own HTML, which the console's policy forbids.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {**CONSOLE_HEADERS, "content-security-policy": CONTENT_SECURITY_POLICY}
PAGE: Final = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>Kith: API reference</title>
    <link rel="icon" href="console/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="docs/swagger-ui.css">
    <script src="docs/swagger-ui-bundle.js" defer></script>
    <script src="console/reference.js" type="module"></script>
  </head>
  <body><main id="reference"></main></body>
</html>
"""


@routes.head(SCHEMA)
@routes.get(SCHEMA)
async def schema(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@routes.head("/docs")
@routes.get("/docs")
async def docs() -> Response:
    return HTMLResponse(PAGE, headers=HEADERS)


@routes.head("/docs/openapi.json")
@routes.get("/docs/openapi.json")
async def schema_3_0(request: Request) -> Response:
    """Return the document as OpenAPI 3.0, the latest version that Swagger UI 4 reads."""
    document = to_openapi_3_0(request.app.openapi())
    return JSONResponse({**document, "openapi": "3.0.3", "servers": [{"url": ".."}]}, headers=HEADERS)


@routes.head("/docs/swagger-ui.css")
@routes.get("/docs/swagger-ui.css")
async def styles() -> Response:
    return Response(_bundled("swagger-ui.css"), media_type="text/css", headers=HEADERS)


@routes.head("/docs/swagger-ui-bundle.js")
@routes.get("/docs/swagger-ui-bundle.js")
async def script() -> Response:
    return Response(_bundled("swagger-ui-bundle.js"), media_type="text/javascript", headers=HEADERS)


@cache
def _bundled(name: str) -> bytes:
    content: bytes = (swagger_ui_path / name).read_bytes()
    return content


def to_openapi_3_0(part: Any) -> Any:
    """Convert part of an OpenAPI 3.1 document to 3.0.

    A null type becomes `nullable`, a constant an enumeration, an exclusive bound a flag, and examples one example.
    """
    if isinstance(part, list):
        return [to_openapi_3_0(each) for each in part]
    if not isinstance(part, dict):
        return part
    converted = {name: to_openapi_3_0(value) for name, value in part.items()}
    choices = converted.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        converted["nullable"] = True
        rest = [choice for choice in choices if choice != {"type": "null"}]
        converted["anyOf"] = rest
        if len(rest) == 1 and "$ref" not in rest[0]:
            del converted["anyOf"]
            converted = {**rest[0], **converted}
    if "const" in converted and "type" in converted:
        converted["enum"] = [converted.pop("const")]
    if isinstance(examples := converted.get("examples"), list):
        del converted["examples"]
        converted |= {"example": examples[0]} if examples else {}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(converted.get(flag), int | float) and not isinstance(converted[flag], bool):
            converted |= {bound: converted[flag], flag: True}
    return converted
