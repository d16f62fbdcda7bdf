"""Keyword options of the client's methods, as typed dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from kith.wire.common import Detail, FaceChoice, IndexSetting, LivenessSetting, Preset


class Risk(TypedDict, total=False):
    """Accepted risk. Set exactly one key.

    ``fpir``: false positive identification rate. ``fmr``: false match rate. ``preset``: a named rate (0.0001, 0.001,
    0.01). ``threshold``: cosine similarity in [-1, 1].
    """

    fpir: float
    fmr: float
    preset: Preset
    threshold: float


class FilterOptions(TypedDict, total=False):
    """Subjects to search. They must have all tags and all metadata entries."""

    tags: Sequence[str]
    metadata: Mapping[str, Any]


class QualityGateOptions(TypedDict, total=False):
    """Minimum photo quality. Yaw is a fraction in [0, 1], brightness is in [0, 255]."""

    min_eye_distance_px: float
    min_sharpness: float
    min_brightness: float
    max_brightness: float
    min_contrast: float
    max_abs_yaw: float


class GalleryOptions(TypedDict, total=False):
    """Settings of a gallery; /docs of the server has their ranges. None selects the server's default."""

    risk: Risk | None
    quality_gate: QualityGateOptions | None
    review_factor: float | None
    one_face_per_person: bool | None
    index: IndexSetting | None
    recall: float | None
    keep_crops: bool | None
    retention_days: int | None
    remember_strangers_days: int | None
    liveness: LivenessSetting | None
    liveness_threshold: float | None


class SubjectChanges(TypedDict, total=False):
    name: str | None
    metadata: Mapping[str, Any]
    tags: Sequence[str]


class Checks(TypedDict, total=False):
    """Checks of an enrollment to skip."""

    allow_duplicate: bool | None
    allow_inconsistent: bool | None
    allow_low_quality: bool | None
    allow_not_live: bool | None


class ArchiveOptions(Checks, total=False):
    """``strip`` is the number of folders above the folders of the subjects. ``detail`` as in ``enroll``.
    ``names`` is the encoding of names that the archive does not declare, such as gbk; default: UTF-8."""

    face: FaceChoice | None
    detail: Detail | None
    strip: int | None
    names: str | None
