"""Entities of the domain: galleries, subjects, templates, change log entries and search hits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kith.wire.common import IndexSetting, LivenessSetting, TemplateKind
from kith.wire.subjects import SubjectOut, TemplateOut
from models.risk.impostor_evidence import ImpostorEvidence
from models.runtime.network import Float
from models.vision.quality import QualityGate
from service.core.errors import GalleryMovedError
from service.domain.events import EventFilter
from service.domain.outcomes import REVIEW_FACTOR, RiskTarget

if TYPE_CHECKING:
    from service.security.sealing import Seal

Keys = NDArray[np.int64]
"""Primary keys of templates or subjects, (n,)."""
DEFAULT_RISK: Final = RiskTarget("fpir", 0.01)
DEFAULT_RECALL: Final = 0.999


@dataclass(frozen=True)
class GallerySettings:
    risk: RiskTarget = DEFAULT_RISK
    quality_gate: QualityGate = field(default_factory=QualityGate)
    review_factor: float = REVIEW_FACTOR
    one_face_per_person: bool = True
    """Identify a person in one face of a photo only."""
    keep_crops: bool = False
    """Store the face crop of each template, so that another recognizer can embed it."""
    index: IndexSetting = "auto"
    recall: float = DEFAULT_RECALL
    """Required recall@1 of approximate search."""
    retention_days: int | None = None
    """Age at which templates, and subjects without templates, are erased. None: never."""
    remember_strangers_days: int | None = None
    """Time since they were last seen after which remembered strangers are erased. None: strangers are not remembered.
    """
    liveness: LivenessSetting = "off"
    liveness_threshold: float | None = None
    """None: the threshold of the pack."""


GenerationState = Literal["current", "next", "previous", "dropped"]


@dataclass(frozen=True)
class Generation:
    """Vectors of a gallery by one recognizer.

    ``state`` is one of: current (answers requests), next (a migration fills it, or filled it before a roll-back),
    previous (answered before the migration) and dropped (its vectors are deleted). A ``number`` is never reused.
    """

    number: int
    fingerprint: str
    dimension: int
    model: str | None
    state: GenerationState
    evidence_sequence: int | None = None


@dataclass(frozen=True)
class Gallery:
    """Gallery, bound to the recognizer ``fingerprint``.

    ``pk`` is never reused after deletion. ``seal`` encrypts and decrypts the personal data of the gallery.
    """

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
    """Change log sequence of the stored evidence, None without evidence."""
    generation: int = 0
    """Generation that is read, whose vectors ``fingerprint`` made."""
    current_generation: int = 0
    """Generation that answers requests; differs from ``generation`` during a migration only."""
    log_floor: int = 0
    """Change log entries up to this sequence may be deleted. A follower behind it starts from a snapshot."""
    last_change: int = 0
    """Sequence of the latest change log entry: of the last enrollment or removal of a template."""
    other: Generation | None = None
    """Second generation during a migration, or until a rollback is no longer possible."""
    moved: bool = False
    """True if the gallery has, or had, vectors of a second recognizer."""
    companion_of: int | None = None
    """Key of the gallery whose strangers are the subjects of this one, which is hidden."""
    outsiders: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Keys of outsiders with a vector of the current generation, and of the subjects that they were mistaken for."""
    version: int = 0
    """Version tag that changes with every change of the gallery or its content. Versions have no order."""
    erased: int = 0
    """Number of the latest erasure. Work begun before an erasure must not store data of the erased subject."""
    webhooks: int = 0
    """State of all webhooks when the gallery was read: a number that is different after each change; 0: there are none.
    """
    listeners: tuple[EventFilter, ...] = ()
    """Filters of the webhooks that want decisions of this gallery."""

    def at_generation(self, generation: int) -> Gallery:
        """Return the gallery with the vectors of another generation.

        Raises:
            GalleryMovedError: The gallery has no such generation, or no longer.
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
class SubjectFaces:
    """Data that a verification compares a face with: (n, d) unit vectors of the subject's templates, (n,) quality
    scores, NaN for bare embeddings, and the (k, d) vectors of its decoys; None without decoys."""

    vectors: Float
    qualities: Float
    decoys: Float | None


@dataclass(frozen=True, eq=False)
class StoredEvidence:
    """Evidence of a gallery at ``sequence`` of its change log, from ``templates`` templates."""

    sequence: int
    templates: int
    evidence: ImpostorEvidence
    derived_at: datetime


@dataclass(frozen=True)
class SubjectRecord:
    """What is sealed of a subject."""

    id: str
    name: str | None
    metadata: dict[str, Any]
    tags: list[str]


class Subject(SubjectOut):
    pk: int = Field(exclude=True)


Described = SubjectRecord | Subject


@dataclass(frozen=True)
class SubjectLabel:
    """Public ID and name of a subject."""

    id: str
    name: str | None


class Template(TemplateOut):
    pk: int = Field(exclude=True)
    subject: str = Field(exclude=True)


@dataclass(frozen=True)
class Crop:
    """Encoded part of a photo around a face, with five ``landmarks_xy`` in pixels of the crop."""

    image: bytes
    landmarks_xy: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class NewTemplate:
    """Template to enroll, with a (d,) unit ``vector``.

    ``face_count``: faces of its photo. It is recorded with the item of a job, not with the template. ``created_at``:
    None, or a time in the future, is now.
    """

    id: str
    vector: Float
    kind: TemplateKind
    quality: dict[str, float] | None = None
    detection_score: float | None = None
    crop: Crop | None = None
    face_count: int | None = None
    created_at: datetime | None = None


class Person(NamedTuple):
    """What is stored of a new subject besides its id. Times as of NewTemplate."""

    name: str | None = None
    metadata: dict[str, Any] | None = None
    tags: list[str] | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True)
class Item:
    """Template to store with its subject, or a subject alone. ``number``: of the caller."""

    subject: str
    template: NewTemplate | None = None
    number: int = 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All templates of a gallery at one ``sequence`` of its change log, ordered by subject, then by age.

    ``template_pks`` and ``subject_pks`` are (m,), ``vectors`` (m, d) unit vectors, ``qualities`` (m,) scores in [0, 1],
    NaN for templates enrolled as embeddings.
    """

    sequence: int
    template_pks: NDArray[np.int64]
    subject_pks: NDArray[np.int64]
    vectors: Float
    qualities: Float


@dataclass(frozen=True)
class GalleryCounts:
    """Totals over all galleries, and (subjects, templates) of some galleries by name."""

    galleries: int
    subjects: int
    templates: int
    by_gallery: Mapping[str, tuple[int, int]]


class LogTrimmedError(Exception):
    """Change log entries that a follower needs are deleted. It must restart from a snapshot."""


@dataclass(frozen=True)
class SubjectFilter:
    """Filter for subjects that have all ``tags``, and equal values for the keys of ``metadata``."""

    tags: tuple[str, ...] = ()
    metadata: tuple[tuple[str, Any], ...] = ()


class Hit(NamedTuple):
    """Search hit: a subject and its fused similarity."""

    subject_pk: int
    similarity: float


@dataclass(frozen=True)
class IdempotentResponse:
    """Stored response of a request with an Idempotency-Key. ``digest`` identifies the request."""

    key: str
    digest: str
    response: str
