"""The API's description: for programs, and for people."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import JSONResponse

from service.api.permissions import Permitted

router = APIRouter(route_class=Permitted, include_in_schema=False)
SCHEMA = "/openapi.json"


@router.get(SCHEMA)
async def schema(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@router.get("/docs")
async def docs(request: Request) -> Response:
    return get_swagger_ui_html(openapi_url=SCHEMA, title=request.app.title)


@router.get("/redoc")
async def redoc(request: Request) -> Response:
    return get_redoc_html(openapi_url=SCHEMA, title=request.app.title)
