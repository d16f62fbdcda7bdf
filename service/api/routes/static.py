"""Static files of the web console, and the API reference by a local copy of Swagger UI.

The console calls the API with the key that its user enters.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import fastapi_offline
from fastapi import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

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
REFERENCE: Final = _Files(files(fastapi_offline) / "static", REFERENCE_HEADERS)


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


@routes.api_route("/docs/swagger-ui.css", methods=READ)
@routes.api_route("/docs/swagger-ui-bundle.js", methods=READ)
async def reference_file(request: Request) -> Response:
    return await REFERENCE.get_response(request.url.path.rpartition("/")[2], request.scope)
