"""Albums: uploaded photos whose faces are grouped into people."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from kith.wire.fields import ObjectId, PersonName, Problem, RequestModel, SubjectId, Timestamp
from kith.wire.subjects import ChecksIn

GROUP_ID: Final = "^g[1-9][0-9]{0,8}$"
GroupId = Annotated[str, Field(pattern=GROUP_ID, examples=["g1"])]
MAX_SPLIT: Final = 1000
"""Faces that one request splits off."""


class AlbumOut(BaseModel):
    """Album. Its id is that of the job that makes it."""

    id: str
    state: Literal["grouping", "ready"] = Field(description="Groups exist once the album is ready.")
    risk: float = Field(description="Accepted share of pairs of faces in one group that are two people.")
    threshold: float | None = Field(description="Similarity from which groups merged; null: too few faces.")
    photo_count: int = Field(description="Photos without copies and unreadable ones.")
    face_count: int = Field(description="Faces that were not enrolled yet.")
    group_count: int = Field(description="Groups of several faces.")
    single_count: int = Field(description="Groups of one face.")
    created_at: Timestamp
    expires_at: Timestamp = Field(description="The album is deleted then.")


class AlbumFaceOut(BaseModel):
    """Face of a photo of the album."""

    id: str
    photo: str = Field(description="Name of the photo in the archive.")
    box: list[float] = Field(description="x0, y0, x1, y1 in pixels of the upright photo.")
    certainty: float | None = Field(
        description="Probability that the face and the others of its group are one person; null: it is alone, or "
        "a caller put it there."
    )
    reasons: list[str] = Field(description="Why the quality is too low for grouping; empty otherwise.")


class AlbumGroupOut(BaseModel):
    """Faces that are taken for one person."""

    id: str
    subject: str | None = Field(description="The subject as which other faces of the group were enrolled.")
    name: str | None
    face_count: int
    faces: list[AlbumFaceOut] = Field(description="Up to eight faces, the most certain first.")


class AlbumMergeIn(RequestModel):
    into: GroupId = Field(description="The group that remains.")


class AlbumSplitIn(RequestModel):
    faces: list[ObjectId] = Field(min_length=1, max_length=MAX_SPLIT, description="Faces of the new group.")


class AlbumEnrollIn(ChecksIn):
    """Who the group is, and the checks to skip."""

    subject: SubjectId = Field(description="Two groups may be one person.")
    name: PersonName | None = Field(None, description="For a subject without one.")


class RefusedFaceOut(BaseModel):
    face: str
    problem: Problem


class AlbumEnrolledOut(BaseModel):
    """Result of an enrollment. Enrolled faces left the album."""

    subject: str
    enrolled_count: int
    refused: list[RefusedFaceOut]
    remaining_count: int = Field(
        description="Faces left in the group: refused ones, and those beyond 500 in one request."
    )
