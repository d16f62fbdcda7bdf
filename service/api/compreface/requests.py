"""Query options and bodies that several routes share: photos in forms or base64."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

from fastapi import Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, RootModel, model_validator

from kith.wire.fields import NORMALIZED, SubjectId
from kith.wire.photos import PhotoBytes
from models.vision.face_search import Detail
from service.api.compreface.similarity import to_probability
from service.api.http.access import BackendDep
from service.api.http.bodies import (
    TimeoutMs,
    deadline,
    max_body_bytes,
    media_type,
    read_form,
    read_json,
    set_body_limit,
    unsupported,
)
from service.core.errors import ImageError, InvalidRequestError
from service.inference.photo_pipeline import Face

MAX_PREDICTIONS: Final = 100
MAX_ERASED: Final = 200
"""Maximum number of subjects or templates to erase in one transaction, which holds the gallery's lock for a second."""
ImageId = Annotated[UUID, Path(description="Id of a template.")]
SubjectQuery = Annotated[str, NORMALIZED, Query(description="Id of a subject; empty: all subjects.")]
PredictionCount = Annotated[int, Query(ge=-1, description="Candidates per face; 0 and -1: all.")]


@dataclass(frozen=True)
class FaceOptions:
    """Options of all routes that take a photo. Unknown ``face_plugins`` are ignored. CompreFace has no ``detail``."""

    limit: Annotated[int, Query(ge=0, description="Faces to return, largest first; 0: all.")] = 0
    det_prob_threshold: Annotated[float | None, Query(ge=0, le=1)] = None
    face_plugins: str = ""
    status: bool = False
    detail: Detail | None = None

    def has_plugin(self, name: str) -> bool:
        return name in (part.strip() for part in self.face_plugins.split(","))

    def choose(self, faces: Sequence[Face]) -> list[Face]:
        """Return the requested faces, largest first. Raises no_face: there is none."""
        threshold = self.det_prob_threshold or 0
        chosen = [face for face in faces if to_probability(face.score) >= threshold]
        if not chosen:
            raise ImageError("no_face", "no face was found in the photo")
        chosen.sort(key=lambda face: -float((face.box_xyxy[2:] - face.box_xyxy[:2]).prod()))
        return chosen[: self.limit or None]


OptionsDep = Annotated[FaceOptions, Depends()]


class SubjectBody(BaseModel):
    """A subject's name. CompreFace also takes it as a bare JSON string, which its .NET SDK sends to rename."""

    subject: SubjectId

    @model_validator(mode="before")
    @classmethod
    def _named(cls, body: object) -> object:
        return {"subject": body} if isinstance(body, str) else body


class ImageIds(RootModel[list[UUID]]):
    pass


class FileBody(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")

    file: PhotoBytes


def max_predictions(count: int) -> int:
    return min(count, MAX_PREDICTIONS) if count > 0 else MAX_PREDICTIONS


async def _read_file(request: Request, backend: BackendDep, timeout_ms: TimeoutMs = None) -> AsyncIterator[bytes]:
    """Yield the photo ``file``, from a form part or a base64 string of JSON.

    Raises InvalidRequestError, unsupported_media_type.
    """
    set_body_limit(request, max_body_bytes(backend.settings, 1))
    with backend.metrics.stage("read"):
        kind = media_type(request)
        if kind == "application/json":
            photo = (await read_json(request, FileBody)).file
        elif kind == "multipart/form-data":
            part = dict(await read_form(request, 1)).get("file")
            if not isinstance(part, bytes):
                raise InvalidRequestError("the form has no file 'file'")
            photo = part
        else:
            raise unsupported(kind)
    async with deadline(request, timeout_ms, backend.settings.deadline_s):
        yield photo


FileDep = Annotated[bytes, Depends(_read_file, scope="function")]
