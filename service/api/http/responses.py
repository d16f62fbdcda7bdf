"""Responses from documents."""

from __future__ import annotations

from starlette.responses import Response

from service.usecases.documents import Document, encode_json


def json_response(document: Document) -> Response:
    return Response(encode_json(document), media_type="application/json")
