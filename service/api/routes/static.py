"""Static files of the web console, and the API reference by a local copy of Swagger UI.

The console calls the API with the key that its user enters.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from fastapi import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from swagger_ui_bundle import swagger_ui_path

from service.api.http.access import router

console_routes = router()
"""A stateless service has no console. Its reference uses the console's files."""
routes = router()
READ: Final = ["GET", "HEAD"]
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # cache, but revalidate by ETag
}
# Swagger UI needs inline styles and sanitizes its own HTML, which the console's policy forbids.
REFERENCE_HEADERS: Final = HEADERS | {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
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


class _Files(StaticFiles):
    """Files of a folder, sent with these headers."""

    def __init__(self, directory: Any, headers: dict[str, str]) -> None:
        super().__init__(directory=str(directory))
        self._headers = headers

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response


CONSOLE: Final = _Files(files("service") / "console", HEADERS)
REFERENCE: Final = _Files(swagger_ui_path, REFERENCE_HEADERS)


@console_routes.api_route("/", methods=READ)
async def root() -> Response:
    """Redirect a browser to the console. Locations are relative, because a proxy may add a path prefix."""
    return RedirectResponse("console", 307)


@console_routes.api_route("/console", methods=READ)
async def console(request: Request) -> Response:
    return await CONSOLE.get_response("index.html", request.scope)


@routes.api_route("/console/{file:path}", methods=READ)
async def console_file(request: Request, file: str) -> Response:
    if file in ("", "index.html"):
        return RedirectResponse("../console", 308)
    return await CONSOLE.get_response(file, request.scope)


@routes.api_route("/openapi.json", methods=READ)
async def schema(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@routes.api_route("/docs", methods=READ)
async def docs() -> Response:
    return HTMLResponse(PAGE, headers=REFERENCE_HEADERS)


@routes.api_route("/docs/openapi.json", methods=READ)
async def schema_3_0(request: Request) -> Response:
    """Return the document as OpenAPI 3.0, the latest version that Swagger UI 4 reads."""
    document = to_openapi_3_0(request.app.openapi())
    return JSONResponse({**document, "openapi": "3.0.3", "servers": [{"url": ".."}]}, headers=REFERENCE_HEADERS)


@routes.api_route("/docs/swagger-ui.css", methods=READ)
@routes.api_route("/docs/swagger-ui-bundle.js", methods=READ)
async def reference_file(request: Request) -> Response:
    return await REFERENCE.get_response(request.url.path.rpartition("/")[2], request.scope)


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
