"""The API's description: for programs, and for people by Swagger UI, whose files are served from here."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from swagger_ui_bundle import swagger_ui_path

from service.api.console import HEADERS as OF_CONSOLE
from service.api.permissions import Permitted

router = APIRouter(route_class=Permitted, include_in_schema=False)
SCHEMA: Final = "/openapi.json"
# Swagger UI writes HTML that it cleans itself, which the console's policy would refuse.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {**OF_CONSOLE, "content-security-policy": POLICY}
PAGE: Final = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>Kith: API reference</title>
    <link rel="icon" href="/console/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="/docs/swagger-ui.css">
    <script src="/docs/swagger-ui-bundle.js" defer></script>
    <script src="/console/reference.js" type="module"></script>
  </head>
  <body><main id="reference"></main></body>
</html>
"""


@router.get(SCHEMA)
async def schema(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def docs() -> Response:
    return HTMLResponse(PAGE, headers=HEADERS)


@router.get("/docs/openapi.json")
async def schema_3_0(request: Request) -> Response:
    """As Swagger UI 4 reads it, which knows no later version."""
    return JSONResponse({**as_3_0(request.app.openapi()), "openapi": "3.0.3"}, headers=HEADERS)


@router.get("/docs/swagger-ui.css")
async def styles() -> Response:
    return Response(_bundled("swagger-ui.css"), media_type="text/css", headers=HEADERS)


@router.get("/docs/swagger-ui-bundle.js")
async def script() -> Response:
    return Response(_bundled("swagger-ui-bundle.js"), media_type="text/javascript", headers=HEADERS)


@cache
def _bundled(name: str) -> bytes:
    content: bytes = (swagger_ui_path / name).read_bytes()
    return content


def as_3_0(part: Any) -> Any:
    """OpenAPI 3.1, as FastAPI writes it, in the words of 3.0: null is `nullable`, a constant an enumeration of one,
    bounds that are excluded are flags, and of examples there is one."""
    if isinstance(part, list):
        return [as_3_0(each) for each in part]
    if not isinstance(part, dict):
        return part
    said = {name: as_3_0(value) for name, value in part.items()}
    choices = said.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        said["nullable"] = True
        rest = [choice for choice in choices if choice != {"type": "null"}]
        said["anyOf"] = rest
        if len(rest) == 1 and "$ref" not in rest[0]:
            del said["anyOf"]
            said = {**rest[0], **said}
    if "const" in said and "type" in said:
        said["enum"] = [said.pop("const")]
    if isinstance(examples := said.get("examples"), list):
        del said["examples"]
        said |= {"example": examples[0]} if examples else {}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(said.get(flag), int | float) and not isinstance(said[flag], bool):
            said |= {bound: said[flag], flag: True}
    return said
