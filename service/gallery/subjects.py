"""The domain: galleries, subjects, templates, and what a search returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from models.gallery_risk import ImpostorEvidence
from models.gate import QualityGate
from models.network import Float
from service.decision import MIN_MARGIN, REVIEW_FACTOR, RiskTarget
from service.errors import GalleryMovedError
from service.gallery.fusion import DEFAULT_FUSION, Fusion

if TYPE_CHECKING:
    from service.security.sealing import Seal

DEFAULT_RISK: Final = RiskTarget("fpir", 0.001)
TemplateKind = Literal["photo", "embedding"]
SUBJECT_ID: Final = r"^[^/\\]{1,128}$"
IndexSetting = Literal["auto", "exact", "compact", "graph"]
LivenessSetting = Literal["off", "required"]
ErasedKind = Literal["subject", "template", "gallery"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
DEFAULT_RECALL: Final = 0.999


def printable(text: str) -> str:
    """What an id must be besides fitting SUBJECT_ID. Raises ValueError."""
    if not text.isprintable() or text != text.strip() or text in (".", ".."):
        raise ValueError("must be printable, without spaces at its ends, and not '.' or '..'")
    return text


@dataclass(frozen=True)
class GallerySettings:
    risk: RiskTarget = DEFAULT_RISK
    fusion: Fusion = DEFAULT_FUSION
    quality_gate: QualityGate = field(default_factory=QualityGate)
    review_factor: float = REVIEW_FACTOR
    min_margin: float = MIN_MARGIN
    keep_crops: bool = False
    """Keep the face that each template is made from, so that another recogniser can embed it."""
    index: IndexSetting = "auto"
    recall: float = DEFAULT_RECALL
    """How often a search that does not compare every vector must find the most similar one."""
    retention_days: int | None = None
    """Age at which templates go, and subjects who have none; None: they stay."""
    liveness: LivenessSetting = "off"
    liveness_threshold: float | None = None
    """None: the pack's."""


GenerationState = Literal["current", "shadow", "previous", "set_aside", "dropped"]


@dataclass(frozen=True)
class Generation:
    """A gallery's vectors under one recogniser: those that answer requests (current), that another recogniser makes of
    the same templates before it takes over (shadow), that answered before it did (previous), that it made before the
    gallery was rolled back (set_aside), or none any more (dropped). ``number`` is never used again."""

    number: int
    fingerprint: str
    dimension: int
    model: str | None
    state: GenerationState
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    evidence_sequence: int | None = None


@dataclass(frozen=True)
class Gallery:
    """``pk`` is never used again after deletion; ``fingerprint`` binds the gallery to one recogniser; ``seal`` opens
    what is stored of its people."""

    pk: int
    name: str
    fingerprint: str
    dimension: int
    settings: GallerySettings
    created_at: datetime
    seal: Seal = field(repr=False, compare=False)
    subjects: int = 0
    templates: int = 0
    evidence_sequence: int | None = None
    """Of the change log, at which the stored evidence was derived; None: there is none."""
    generation: int = 0
    """Which of its vectors are read: those that ``fingerprint`` made."""
    current_generation: int = 0
    """Which answer requests; another one only while a gallery moves to another recogniser."""
    log_floor: int = 0
    """Change log lines up to this one may be gone: who followed no further starts from a snapshot."""
    other: Generation | None = None
    """Kept beside the current generation while the gallery moves to another recogniser, or may be rolled back."""
    moved: bool = False
    """Whether it has, or ever had, vectors of a second recogniser."""
    version: int = 0
    """Another number after every change of the gallery, or of anything in it: subjects' names, templates, settings,
    evidence. It says nothing of which is later."""
    erased: int = 0
    """Of its last erasure of a subject: whom a later one names, nothing that was begun by then may store."""

    def under(self, generation: int) -> Gallery:
        """The same gallery as this generation's recogniser sees it, by the same store, follower and risks.

        Raises:
            GalleryMovedError: it has no such generation, or no longer.
        """
        if generation == self.generation:
            return self
        other = self.other
        if other is None or other.number != generation:
            raise GalleryMovedError(f"gallery {self.name!r} has no generation {generation}")
        return replace(
            self,
            fingerprint=other.fingerprint,
            dimension=other.dimension,
            evidence_sequence=other.evidence_sequence,
            generation=other.number,
        )


@dataclass(frozen=True, eq=False)
class StoredEvidence:
    """What a gallery's strangers said at ``sequence`` of its change log, of so many ``templates``."""

    sequence: int
    fusion: Fusion
    templates: int
    scores: ImpostorEvidence
    derived_at: datetime


@dataclass(frozen=True)
class Subject:
    pk: int
    id: str
    name: str | None
    metadata: dict[str, Any]
    tags: list[str]
    created_at: datetime
    updated_at: datetime
    templates: int = 0


@dataclass(frozen=True)
class Named:
    """Who a subject is to the outside."""

    id: str
    name: str | None


@dataclass(frozen=True)
class Template:
    pk: int
    id: str
    subject: str
    kind: TemplateKind
    quality: dict[str, float] | None
    detection_score: float | None
    created_at: datetime


@dataclass(frozen=True)
class Crop:
    """The part of a photo around a face, encoded; ``landmarks_xy``: its five points, in pixels of the crop."""

    image: bytes
    landmarks_xy: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class NewTemplate:
    """A template to be enrolled: ``vector`` (d,) of unit norm; ``others``: by further generations' recognisers."""

    id: str
    vector: Float
    kind: TemplateKind
    quality: dict[str, float] | None = None
    detection_score: float | None = None
    others: Mapping[int, Float] = field(default_factory=dict)
    crop: Crop | None = None


@dataclass(frozen=True)
class Change:
    """One line of the change log; ``vector`` is None for a removal."""

    sequence: int
    template_pk: int
    subject_pk: int
    vector: Float | None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Every template of a gallery as of one ``sequence`` of its change log, by subject and then by age.

    template_pks, subject_pks: (m,); vectors: (m, d) of unit norm; qualities: (m,) scores in [0, 1], NaN where a
    template is a bare embedding.
    """

    sequence: int
    template_pks: NDArray[np.int64]
    subject_pks: NDArray[np.int64]
    vectors: Float
    qualities: Float


@dataclass(frozen=True)
class Sizes:
    """How much there is of all galleries; ``by_gallery``: subjects and templates of some."""

    galleries: int
    subjects: int
    templates: int
    by_gallery: Mapping[str, tuple[int, int]]


class LogTrimmedError(Exception):
    """Change log lines that a follower has not seen are gone: it starts anew from a snapshot."""


@dataclass(frozen=True)
class SubjectFilter:
    """Subjects that bear all ``tags`` and whose metadata equal ``metadata`` in each given key."""

    tags: tuple[str, ...] = ()
    metadata: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Hit:
    """A subject found: its similarity by the gallery's fusion."""

    subject_pk: int
    similarity: float


@dataclass(frozen=True)
class Idempotent:
    """A keyed request: ``digest`` of what was asked, ``response`` to give again."""

    key: str
    digest: str
    response: str
