"""The console: files as they are, for a browser, which asks the API by itself with the key that it is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from service.api.permissions import CONSOLE, Permitted

router = APIRouter(route_class=Permitted, include_in_schema=False)
MEDIA_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a copy may be kept, and is asked about
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    tag: str


@router.get("/")
async def root() -> Response:
    """Whoever opens the server's address in a browser wants to see something."""
    return RedirectResponse(CONSOLE, 307)


@router.get(CONSOLE)
async def index(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get(f"{CONSOLE}/{{file:path}}")
async def file(request: Request, file: str) -> Response:
    return RedirectResponse(CONSOLE, 308) if file in ("", "index.html") else _answer(request, file)


def _answer(request: Request, name: str) -> Response:
    try:
        found = _files()[name]
    except KeyError as error:
        raise HTTPException(404, "the console has no such file") from error
    headers = {**HEADERS, "etag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """All of them, by what comes after `/console/`: nothing else of the disk can be asked for."""
    return dict(_read(files("service") / "console", ""))


def _read(folder: Traversable, path: str) -> list[tuple[str, _File]]:
    found: list[tuple[str, _File]] = []
    for entry in folder.iterdir():
        name, _, suffix = entry.name.rpartition(".")
        if entry.is_dir():
            found += _read(entry, f"{path}{entry.name}/")
        elif name and suffix in MEDIA_TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((f"{path}{entry.name}", _File(content, MEDIA_TYPES[suffix], tag)))
    return found
