"""Albums: unlabeled photos whose faces are grouped into people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import Field

from kith.wire.albums import AlbumGroupOut, AlbumOut
from models.runtime.network import Float
from service.domain.gallery import Crop

MAX_ALBUMS: Final = 20
"""Albums of a gallery."""
MAX_PHOTOS: Final = 20_000
MAX_FACES: Final = 10_000
"""Faces of an album: a minute of grouping, 200 MB of the database."""
EXAMPLES: Final = 8
"""Faces of a group that a list of groups shows."""


class Album(AlbumOut):
    """Album, and the generation of its vectors."""

    pk: int = Field(exclude=True)
    generation: int = Field(exclude=True)


@dataclass(frozen=True)
class FaceRecord:
    """Sealed data of a face: all that a later enrollment needs besides its vector and crop.

    Attributes:
        photo: name of the photo in the archive.
        hash: SHA-256 of the photo.
        number: of the face in its photo, from 1.
        quality: fields of models.vision.quality.Quality.
        reasons: bounds of the gallery's quality gate that the face is outside of.
        liveness: its score, which is None if it could not be judged, and the pack's threshold; None without a model.
    """

    photo: str
    hash: str
    number: int
    box: Sequence[float]
    score: float
    quality: dict[str, float]
    reasons: Sequence[str]
    liveness: Sequence[float | None] | None


@dataclass(frozen=True, eq=False)
class NewAlbumFace:
    """Face with all that is stored of it."""

    record: FaceRecord
    vector: Float
    crop: Crop


class AlbumGroup(AlbumGroupOut):
    """Group with its first EXAMPLES faces."""

    number: int = Field(exclude=True)
    subject_pk: int | None = Field(exclude=True)
