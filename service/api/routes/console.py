"""Static files of the web console. The console calls the API with the key that its user enters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from service.api.http.access import router

routes = router()
CONSOLE: Final = "/console"
MEDIA_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # cache, but revalidate by ETag
}


@dataclass(frozen=True)
class _StaticFile:
    content: bytes
    media_type: str
    etag: str


@routes.head("/")
@routes.get("/")
async def root() -> Response:
    """Redirect a browser to the console. Locations are relative, because a proxy may add a path prefix."""
    return RedirectResponse(CONSOLE.removeprefix("/"), 307)


@routes.head(CONSOLE)  # static files; their API calls need a key
@routes.get(CONSOLE)
async def index(request: Request) -> Response:
    return _respond(request, "index.html")


@routes.head(f"{CONSOLE}/{{file:path}}")
@routes.get(f"{CONSOLE}/{{file:path}}")
async def file(request: Request, file: str) -> Response:
    return RedirectResponse(f"..{CONSOLE}", 308) if file in ("", "index.html") else _respond(request, file)


def _respond(request: Request, name: str) -> Response:
    try:
        found = _load_files()[name]
    except KeyError as error:
        raise HTTPException(404, "the console has no such file") from error
    headers = {**SECURITY_HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def _load_files() -> dict[str, _StaticFile]:
    """Read all files, by their path below `/console/`. No other file can be requested."""
    return dict(_read_folder(files("service") / "console", ""))


def _read_folder(folder: Traversable, path: str) -> list[tuple[str, _StaticFile]]:
    found: list[tuple[str, _StaticFile]] = []
    for entry in folder.iterdir():
        name, _, suffix = entry.name.rpartition(".")
        if entry.is_dir():
            found += _read_folder(entry, f"{path}{entry.name}/")
        elif name and suffix in MEDIA_TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((f"{path}{entry.name}", _StaticFile(content, MEDIA_TYPES[suffix], tag)))
    return found
