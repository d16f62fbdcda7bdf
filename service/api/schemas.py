"""What goes over the wire."""

from __future__ import annotations

import binascii
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    GetPydanticSchema,
    JsonValue,
    PlainSerializer,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from models.gate import QualityGate, Verdict
from models.network import Engine, Precision
from service.decision import FaceChoice, IdentifyOutcome, RiskTarget, Source, VerifyOutcome
from service.drift import DRIFT_DIGITS, Drift, DriftState
from service.gallery.fusion import Fusion
from service.gallery.hygiene import HygieneKind
from service.gallery.merging import MOST
from service.gallery.subjects import (
    SUBJECT_ID,
    ErasedKind,
    Gallery,
    GallerySettings,
    IndexSetting,
    JobState,
    LivenessSetting,
    Subject,
    Template,
    TemplateKind,
    printable,
)
from service.words import CONTROLS

if TYPE_CHECKING:  # a client has none of what these stand on
    from service.gallery.erasure import Examined, Receipt
    from service.gallery.job_store import Job, JobItem
    from service.risk_report import TargetThreshold

PRESETS = {"strict": 0.0001, "standard": 0.001, "relaxed": 0.01}


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError("must hold finite numbers and valid Unicode, not nested too deeply") from error
    return metadata


Metadata = Annotated[dict[str, JsonValue], Field(max_length=MOST), AfterValidator(_storable)]
PLACE: Final = "^[0-9a-f]{58,160}$"
"""Of a cursor that is sealed."""
GALLERY_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
GalleryName = Annotated[str, StringConstraints(pattern=GALLERY_NAME)]
SubjectId = Annotated[str, StringConstraints(pattern=SUBJECT_ID), AfterValidator(printable)]
WITHOUT_NUL = r"^[^\x00]*$"
"""PostgreSQL has no such text."""
IN_ONE_LINE = rf"^[^{CONTROLS}]*$"
PersonName = Annotated[str, StringConstraints(max_length=500, pattern=IN_ONE_LINE)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=IN_ONE_LINE)]
Probability = Annotated[float, Field(ge=1e-12, lt=1)]
Similarity = Annotated[float, Field(ge=-1, le=1)]
MAX_PHOTOS: Final = 1000
"""The most that KITH_MAX_IMAGES can be; requests are held to its value."""
MAX_EMBEDDINGS: Final = 100_000
"""The most that KITH_MAX_EMBEDDINGS can be; requests are held to its value."""
MAX_DIMENSION: Final = 65_536
# One error says enough: to collect them of each of 100,000 items takes a quarter of a second.
Embedding = Annotated[list[FiniteFloat], Field(max_length=MAX_DIMENSION, fail_fast=True)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Fingerprint = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
PhotoUrl = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
DECODED_BYTES: Final = 1 << 20
"""Base64 decoded at once: other threads wait meanwhile."""
MODEL = "By which pack: its name or its recogniser's fingerprint; default: that of KITH_PACK."


def in_utc(at: datetime) -> datetime:
    """Raises ValueError: an aware time that is before or after all times of UTC."""
    try:
        return at.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("it is too early or too late in UTC") from error


class LongStrings(dict[str, bytearray]):
    """Strings that were kept apart from a JSON body, by the string that stands for each in the document."""


def _decode_photo(value: Any, decode: ValidatorFunctionWrapHandler, info: ValidationInfo) -> bytes:
    """Decode base64. ``info.context``: LongStrings, of which the photo's is removed."""
    if not (isinstance(info.context, LongStrings) and value in info.context):
        return cast(bytes, decode(value))
    text = info.context.pop(value)
    if b"\\" in text:  # some encoders of JSON write / as \/
        return cast(bytes, decode(json.loads(b'"' + text + b'"')))
    starts = range(0, len(text), DECODED_BYTES)
    try:
        if 0 <= text.find(b"=") < len(text) - 2:
            raise ValueError("padding before the end")
        photo = bytearray()
        for start in starts:
            photo += binascii.a2b_base64(text[start : start + DECODED_BYTES], strict_mode=True)
        return bytes(photo)
    except ValueError:  # lines, or other characters that are skipped
        return cast(bytes, decode(text.decode("utf-8", "replace")))


PhotoBytes = Annotated[Base64Bytes, WrapValidator(_decode_photo)]


class Request(BaseModel):
    """Unknown fields are refused: a misspelt option must not be silently without effect."""

    model_config = ConfigDict(extra="forbid")


class RiskIn(Request):
    """Exactly one: the accepted false positive identification rate, false match rate, a named preset of these
    (strict 0.0001, standard 0.001, relaxed 0.01), or a bare similarity threshold."""

    fpir: Probability | None = None
    fmr: Probability | None = None
    preset: Literal["strict", "standard", "relaxed"] | None = None
    threshold: Similarity | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> RiskIn:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of fpir, fmr, preset, threshold")
        return self

    def target(self, preset_kind: Literal["fpir", "fmr"]) -> RiskTarget:
        if self.preset is not None:
            return RiskTarget(preset_kind, PRESETS[self.preset])
        if self.threshold is not None:
            return RiskTarget("threshold", self.threshold)
        if self.fpir is not None:
            return RiskTarget("fpir", self.fpir)
        assert self.fmr is not None  # noqa: S101 - the validator saw to it
        return RiskTarget("fmr", self.fmr)


class Photos(Request):
    """``images`` in base64; in multipart requests the photos are file parts named ``images`` instead, and the other
    fields stand as JSON in a part named ``request``."""

    images: list[PhotoBytes] = Field(default_factory=list, max_length=MAX_PHOTOS, fail_fast=True)
    urls: list[PhotoUrl] = Field(
        default_factory=list,
        max_length=MAX_PHOTOS,
        fail_fast=True,
        description="Photos to be fetched from hosts in KITH_URL_HOSTS; they count after the others.",
    )

    @property
    def photos(self) -> list[bytes | str]:
        """All, in order: bytes, or where they are."""
        return [*self.images, *self.urls]


class Probes(Photos):
    """Photos, given embeddings, or both."""

    embeddings: list[Embedding] = Field(default_factory=list, max_length=MAX_EMBEDDINGS, fail_fast=True)
    recogniser: Fingerprint | None = Field(
        None,
        description="Whose the embeddings are, as /v1/embed says; refused if the gallery's is another, or if it is not "
        "said and the gallery has, or ever had, vectors of two recognisers.",
    )


class DetectIn(Photos):
    pass


class EmbedIn(Photos):
    model: ModelName | None = Field(None, description=MODEL)


class FilterIn(Request):
    tags: list[Tag] = Field(default_factory=list, max_length=32)
    metadata: Metadata = Field(default_factory=dict)


class IdentifyIn(Probes):
    faces: Literal["all", "largest"] = "all"
    top_k: int = Field(5, ge=1, le=100)
    risk: RiskIn | None = Field(None, description="Default: the gallery's.")
    filter: FilterIn | None = None
    check_quality: bool = Field(True, description="Answer rejected_quality for faces below the gallery's gate.")


class EnrolIn(Probes):
    face: FaceChoice = "only"
    allow_duplicate: bool = False
    allow_inconsistent: bool = False
    allow_low_quality: bool = False
    allow_not_live: bool = False


class SubjectRef(Request):
    gallery: GalleryName
    subject: SubjectId


class Side(Request):
    """One of the two to compare: exactly one of image, url, embedding, subject."""

    image: PhotoBytes | None = None
    url: PhotoUrl | None = Field(None, description="A photo to be fetched from a host in KITH_URL_HOSTS.")
    embedding: Embedding | None = None
    subject: SubjectRef | None = None
    recogniser: Fingerprint | None = Field(None, description="Whose the embedding is, as /v1/embed says.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Side:
        if len(self.model_fields_set - {"recogniser"}) != 1:
            raise ValueError("give exactly one of image, url, embedding, subject")
        return self


class VerifyIn(Request):
    """In multipart requests the photos are file parts named ``a`` and ``b``."""

    a: Side
    b: Side
    risk: RiskIn | None = Field(
        None,
        description="Default: of a face and a subject the gallery's, if an FMR or a threshold; else standard.",
    )
    model: ModelName | None = Field(None, description=f"{MODEL[:-1]}, or that of a subject's gallery.")
    require_liveness: bool = Field(
        False, description="Of photos, that people were there; a subject's gallery may require it, too."
    )


class QualityGateIn(Request):
    min_eye_distance_px: FiniteFloat = Field(QualityGate.min_eye_distance_px, ge=0)
    min_sharpness: FiniteFloat = Field(QualityGate.min_sharpness, ge=0)
    min_brightness: FiniteFloat = Field(QualityGate.min_brightness, ge=0, le=255)
    max_brightness: FiniteFloat = Field(QualityGate.max_brightness, ge=0, le=255)
    min_contrast: FiniteFloat = Field(QualityGate.min_contrast, ge=0)
    max_abs_yaw: FiniteFloat = Field(QualityGate.max_abs_yaw, ge=0, le=1)


class GallerySettingsIn(Request):
    risk: RiskIn | None = None
    fusion: Fusion | None = None
    quality_gate: QualityGateIn | None = None
    review_factor: FiniteFloat | None = Field(
        None, ge=1, le=1000, description="Answers between the asked risk and so many times it are 'uncertain'; 1: none."
    )
    min_margin: FiniteFloat | None = Field(
        None, ge=0, le=1, description="Two subjects nearer to each other than this are lookalikes: neither is named."
    )
    index: IndexSetting | None = Field(
        None, description="How vectors are searched: exact compares every one; auto picks by the gallery's size."
    )
    recall: FiniteFloat | None = Field(
        None, ge=0.5, le=1, description="How often an index that is not exact must find the most similar vector."
    )
    keep_crops: bool | None = Field(
        None, description="Keep the face of each photo enrolled, so that another recogniser can embed it."
    )
    retention_days: int | None = Field(
        None, ge=1, le=36_500, description="Age at which templates are erased, and subjects without any; null: never."
    )
    liveness: LivenessSetting | None = Field(
        None,
        description="required: faces that are not taken for people before a camera are neither searched nor enrolled.",
    )
    liveness_threshold: FiniteFloat | None = Field(
        None, ge=0, le=1, description="The least score of a live face; null: the pack's."
    )

    def over(self, current: GallerySettings) -> GallerySettings:
        """The current settings with what was given replaced."""
        gate = self.quality_gate
        return GallerySettings(
            risk=self.risk.target("fpir") if self.risk else current.risk,
            fusion=self.fusion or current.fusion,
            quality_gate=replace(current.quality_gate, **gate.model_dump(exclude_unset=True))
            if gate
            else current.quality_gate,
            review_factor=current.review_factor if self.review_factor is None else self.review_factor,
            min_margin=current.min_margin if self.min_margin is None else self.min_margin,
            index=self.index or current.index,
            recall=current.recall if self.recall is None else self.recall,
            keep_crops=current.keep_crops if self.keep_crops is None else self.keep_crops,
            retention_days=self.retention_days if "retention_days" in self.model_fields_set else current.retention_days,
            liveness=self.liveness or current.liveness,
            liveness_threshold=self.liveness_threshold
            if "liveness_threshold" in self.model_fields_set
            else current.liveness_threshold,
        )


class GalleryIn(GallerySettingsIn):
    name: GalleryName


class SubjectIn(Request):
    name: PersonName | None = None
    metadata: Metadata = Field(default_factory=dict)
    tags: list[Tag] = Field(default_factory=list, max_length=MOST)


class SubjectPatch(Request):
    name: PersonName | None = None
    metadata: Metadata | None = None
    tags: list[Tag] | None = Field(None, max_length=MOST)


class MergeIn(Request):
    into: SubjectId = Field(description="The subject who stays.")


class TemplatePatch(Request):
    subject: SubjectId = Field(description="The subject to file it under.")


# Answers


class Problem(BaseModel):
    """RFC 9457. ``code`` is stable; ``remedy`` says what to do."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    remedy: str
    request_id: str | None = None


class QualityOut(BaseModel):
    eye_distance_px: float
    sharpness: float
    brightness: float
    contrast: float
    yaw: float
    pitch: float
    roll_deg: float
    score: float = Field(
        description="How usable for recognition, 0 to 1: size, sharpness, exposure and yaw. Nothing is decided by it."
    )
    usable: bool = Field(description="Whether it passes the quality gate (the gallery's, else the default).")
    reasons: list[str] = Field(description="The values out of bounds.")


class LivenessOut(BaseModel):
    score: float | None = Field(
        description="How surely a person was before the camera, 0 to 1; null: too little surrounds the face to tell."
    )
    verdict: Verdict = Field(description="By the gallery's threshold, else the pack's.")


def _written(vector: NDArray[np.float32]) -> list[float]:
    """With as many digits as a float32 needs, as the service writes them."""
    return [float(str(value)) for value in vector]


_Numbers = Annotated[
    list[float], AfterValidator(lambda numbers: np.array(numbers, np.float32)), PlainSerializer(_written)
]
Vector = Annotated[NDArray[np.float32], GetPydanticSchema(lambda _, handler: handler(_Numbers))]
"""On the wire numbers; to who reads an answer an array, (d,)."""


class FaceOut(BaseModel):
    box: list[float] = Field(description="x0, y0, x1, y1 in pixels of the upright photo.")
    landmarks: list[list[float]] = Field(description="Left eye, right eye, nose, left and right mouth corner: x, y.")
    score: float
    quality: QualityOut
    liveness: LivenessOut | None = Field(None, description="Where the pack has a model that tells it.")
    embedding: Vector | None = Field(None, description="Unit length; only from /v1/embed.")


class PhotoOut(BaseModel):
    width: int | None = None
    height: int | None = None
    faces: list[FaceOut] = Field(default_factory=list)
    error: Problem | None = Field(None, description="Why this photo of several could not be used.")


class FacesOut(BaseModel):
    model: str
    recogniser: str | None = Field(None, description="Fingerprint of whose the embeddings are.")
    images: list[PhotoOut]


class RiskOut(BaseModel):
    fpir: float | None = None
    fmr: float | None = None
    threshold: float | None = None
    source: Source | Literal["explicit"]
    extrapolated: bool = Field(description="The risk is smaller than the evidence can support by counting.")


class CandidateOut(BaseModel):
    subject: str
    name: str | None = None
    similarity: float
    false_alarm_probability: float | None = None


class IdentityOut(BaseModel):
    """The answer for one face, one given embedding, or one photo without a usable face."""

    image: int | None = Field(None, description="Which photo of the call.")
    embedding: int | None = Field(None, description="Which given embedding of the call.")
    face: FaceOut | None = None
    outcome: IdentifyOutcome | Literal["error"]
    subject: str | None = Field(None, description="Named only where the outcome is identified.")
    name: str | None = None
    similarity: float | None = Field(
        None,
        description="Of the best candidate; coarse without the scope admin, as are candidates, runner_up, margin and "
        "probabilities (docs/keys.md).",
    )
    threshold: float | None = None
    review_threshold: float | None = None
    runner_up: CandidateOut | None = None
    margin: float | None = None
    false_alarm_probability: float | None = Field(
        None, description="How likely a stranger's best score here is at least this similarity."
    )
    risk: RiskOut | None = None
    candidates: list[CandidateOut] = Field(default_factory=list)
    reasons: list[str] = Field(default_factory=list)
    error: Problem | None = None


class IdentifyOut(BaseModel):
    gallery: str
    model: str
    recogniser: str
    results: list[IdentityOut]


class SideOut(BaseModel):
    face: FaceOut | None = None
    faces_found: int | None = None


class VerifyOut(BaseModel):
    model: str
    outcome: VerifyOutcome
    similarity: float | None = Field(
        None,
        description="Coarse in a comparison with a subject without the scope admin (docs/keys.md).",
    )
    threshold: float | None = None
    review_threshold: float | None = None
    false_match_probability: float | None = Field(
        None, description="How likely two different people are at least this similar."
    )
    risk: RiskOut | None = None
    reasons: list[str] = Field(default_factory=list)
    a: SideOut
    b: SideOut


class ComparisonOut(BaseModel):
    observed: float
    expected: float
    z: float = Field(description="Observed less expected, in standard errors.")


class DriftOut(BaseModel):
    """The latest decisions of the process that answers, beside what the calibration expects of them."""

    state: DriftState = Field(
        description="watch and drifted: 3 and 4 standard errors away; unchanged decisions are called drifted less than "
        "once in a thousand times that one asks."
    )
    detail: str
    window: dict[IdentifyOutcome, int] = Field(description="The latest 1000 decisions by outcome.")
    since_start: dict[IdentifyOutcome, int] = Field(description="All since the process started.")
    mated_similarity: ComparisonOut | None = Field(None, description="Of those identified, on average; from 100 on.")
    unknown_rate: ComparisonOut | None = Field(
        None, description="Share of the searches that found nobody, beside that of the window before; from 200 on."
    )

    @classmethod
    def of(cls, drift: Drift) -> DriftOut:
        mated, unknown = (
            None
            if c is None
            else ComparisonOut(observed=round(c.observed, DRIFT_DIGITS), expected=c.expected, z=round(c.z, 1))
            for c in (drift.mated, drift.unknown)
        )
        return cls(
            state=drift.state,
            detail=drift.detail,
            window=drift.window,
            since_start=drift.since_start,
            mated_similarity=mated,
            unknown_rate=unknown,
        )


class GalleryOut(BaseModel):
    name: str
    recogniser: str
    dimension: int
    risk: dict[str, float]
    fusion: Fusion
    quality_gate: QualityGateIn
    review_factor: float
    min_margin: float
    index: IndexSetting
    recall: float
    keep_crops: bool
    retention_days: int | None = None
    liveness: LivenessSetting
    liveness_threshold: float | None = Field(description="null: the pack's.")
    subjects: int
    templates: int
    created_at: datetime
    drift: DriftOut | None = Field(None, description="Only where one gallery is asked for.")

    @classmethod
    def of(cls, gallery: Gallery) -> GalleryOut:
        settings = gallery.settings
        return cls(
            name=gallery.name,
            recogniser=gallery.fingerprint,
            dimension=gallery.dimension,
            risk={settings.risk.kind: settings.risk.value},
            fusion=settings.fusion,
            quality_gate=QualityGateIn(**vars(settings.quality_gate)),
            review_factor=settings.review_factor,
            min_margin=settings.min_margin,
            index=settings.index,
            recall=settings.recall,
            keep_crops=settings.keep_crops,
            retention_days=settings.retention_days,
            liveness=settings.liveness,
            liveness_threshold=settings.liveness_threshold,
            subjects=gallery.subjects,
            templates=gallery.templates,
            created_at=gallery.created_at,
        )


class RecallOut(BaseModel):
    """Of probes made from the gallery's own vectors, each of the given similarity to one of them."""

    at_1: float = Field(description="How often the most similar vector was found.")
    at_10: float = Field(description="Which share of the ten most similar was found.")
    sample: int
    similarity: float
    promise: float = Field(description="The gallery's setting: if at_1 is less, every vector is compared.")


class IndexOut(BaseModel):
    """The index of the process that answers, after it caught up with the change log."""

    engine: str
    kind: str
    reason: str = Field(description="Why this kind.")
    vectors: int = Field(description="Templates, or subjects where the fusion makes one vector of each.")
    sequence: int | None = Field(
        description="Line of the change log up to which it has followed; null for a key of some galleries: lines are "
        "counted through all."
    )
    segments: int
    tail: int = Field(description="Vectors in no segment yet.")
    tombstones: int = Field(description="Vectors removed and not cleared away yet; no search finds them.")
    memory_bytes: int
    depth: int | None = Field(description="Candidates that are compared exactly; null where every vector is.")
    recall: RecallOut | None
    compacted_at: datetime | None
    problem: str | None = Field(description="What was wrong with a file of the index, which was made anew.")


class GalleryStatsOut(BaseModel):
    gallery: str
    subjects: int
    templates: int
    index: IndexOut


class RetentionOut(BaseModel):
    """What the gallery's ``retention_days`` would erase now, and whether that waits for a confirmation."""

    gallery: str
    retention_days: int | None
    now: datetime = Field(description="The server's clock: a wrong one makes everything look old.")
    due_templates: int = Field(description="Past their age.")
    due_subjects: int = Field(description="Left without templates then.")
    templates: int
    subjects: int
    held: bool = Field(description="More than KITH_RETENTION_MAX_SHARE: nothing is erased without a confirmation.")


class RetentionIn(Request):
    """A confirmation, for one sweep: nothing is erased where more than this is due."""

    templates: int = Field(ge=0, description="due_templates that were shown.")
    subjects: int = Field(ge=0, description="due_subjects that were shown.")


class RetentionAppliedOut(BaseModel):
    templates: int = Field(description="Erased.")
    subjects: int = Field(description="Erased.")


class GalleriesOut(BaseModel):
    galleries: list[GalleryOut]
    next: str | None = Field(description="Send as 'cursor' for the next page; null on the last.")


class SubjectOut(BaseModel):
    id: str
    name: str | None
    metadata: dict[str, Any]
    tags: list[str]
    templates: int
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, subject: Subject) -> SubjectOut:
        return cls(**{name: getattr(subject, name) for name in cls.model_fields})


class SubjectsOut(BaseModel):
    subjects: list[SubjectOut]
    next: str | None


class TemplateOut(BaseModel):
    id: str
    kind: TemplateKind
    quality: dict[str, float] | None
    detection_score: float | None
    created_at: datetime

    @classmethod
    def of(cls, template: Template) -> TemplateOut:
        return cls(**{name: getattr(template, name) for name in cls.model_fields})


class TemplatesOut(BaseModel):
    subject: str
    templates: list[TemplateOut]
    next: str | None = None


class EnrolledOut(BaseModel):
    image: int | None = None
    embedding: int | None = None
    template: str | None = None
    face: FaceOut | None = None
    error: Problem | None = None


class EnrolOut(BaseModel):
    """One entry per photo and per embedding, in the order sent; each enrolled alone or refused alone."""

    subject: str
    enrolled: int
    results: list[EnrolledOut]


class ReceiptOut(BaseModel):
    id: str
    kind: ErasedKind
    gallery: str
    subject: str | None = Field(None, description="A keyed hash of the id, which only who has the gallery's key makes.")
    template: str | None = None
    removed: dict[str, int] = Field(description="Rows, by kind.")
    at: datetime
    line: int = Field(description="Of the gallery's audit: its number, which with its hash is the proof.")
    hash: str
    log_emptied: bool | None = Field(
        None,
        description="Whether SQLite's write-ahead log was emptied at once; false: it is within a minute of the "
        "last reader of an earlier moment.",
    )

    @classmethod
    def of(cls, receipt: Receipt) -> ReceiptOut:
        return cls(**receipt.document())


class ReceiptsOut(BaseModel):
    receipts: list[ReceiptOut]
    next: str | None = None


class VerdictOut(BaseModel):
    receipt: ReceiptOut
    holds: bool
    line_found: bool = Field(description="The audit has the line that the receipt names.")
    gone: bool = Field(description="What it names is not there.")
    enrolled_since: bool = Field(description="It is there, and came after the erasure.")

    @classmethod
    def of(cls, verdict: Examined) -> VerdictOut:
        found = {name: getattr(verdict, name) for name in ("holds", "line_found", "gone", "enrolled_since")}
        return cls(receipt=ReceiptOut.of(verdict.receipt), **found)


class DeletedOut(BaseModel):
    deleted: bool = True
    subjects: int = 0
    templates: int = 0
    receipt: ReceiptOut

    @classmethod
    def of(cls, receipt: Receipt) -> DeletedOut:
        counts = {what: receipt.removed.get(what, 0) for what in ("subjects", "templates")}
        return cls(**counts, receipt=ReceiptOut.of(receipt))


class MergedOut(BaseModel):
    """``subject``: who stays, as it is now; ``templates``: how many it got; ``receipt``: of who is gone."""

    subject: SubjectOut
    templates: int
    receipt: ReceiptOut


class NamedOut(BaseModel):
    subject: str
    name: str | None = None


class TemplateRefOut(BaseModel):
    template: str
    subject: str


class FindingOut(BaseModel):
    """Something about a gallery that deserves a look."""

    kind: HygieneKind
    subjects: list[NamedOut]
    templates: list[TemplateRefOut] = Field(
        description="Those in question; of duplicates and lookalikes the two most alike."
    )
    similarity: float | None = Field(None, description="Mean over the templates compared; null if nobody else is near.")
    chance: float | None = Field(
        None,
        description="That two different people are so alike, by the pack's calibration, in one comparison. A gallery "
        "makes many.",
    )
    own_similarity: float | None = Field(
        None, description="Of templates in question to the nearest other of their subject."
    )
    belongs_to: str | None = Field(None, description="The subject that a mislabelled template is like.")
    action: str


class HygieneOut(BaseModel):
    """``findings`` by kind (duplicate_subjects, mislabelled_template, inconsistent_subject, lookalikes), the surest
    first; ``total`` counts them all."""

    gallery: str
    total: dict[HygieneKind, int]
    findings: list[FindingOut]
    next: str | None = None


class NetworkOut(BaseModel):
    file: str
    engine: Engine
    precision: Precision
    why: str = Field(description="Why this engine, in these numbers.")
    providers: list[str]


class EvidenceOut(BaseModel):
    source: Source
    gallery_share: float = Field(description="The gallery's own part in the answer; the rest is the pack's.")
    pairs: int = Field(description="Pairs of the gallery's subjects that were compared.")
    probes: int = Field(description="Subjects searched for among all others.")
    duplicate_pairs: float = Field(description="Pairs taken for one person under two names, and left out.")
    pack_pairs: int
    derived_at: datetime | None
    up_to_date: bool = Field(description="False while a change of more than 2 % of the templates is being followed.")


class ThresholdOut(BaseModel):
    """A similarity above 1 is one that none reaches."""

    subjects: int
    threshold: float
    low: float = Field(description="With 'high', the 95 % interval.")
    high: float
    extrapolated: bool
    fnmr: float | None = Field(None, description="The share of an enrolled person's own probes below it, by the pack.")

    @classmethod
    def of(cls, found: TargetThreshold) -> ThresholdOut:
        rounded = {name: round(getattr(found, name), 4) for name in ("threshold", "low", "high")}
        fnmr = None if found.fnmr is None else round(found.fnmr, 4)
        return cls(subjects=found.subjects, extrapolated=found.extrapolated, fnmr=fnmr, **rounded)


class TargetOut(BaseModel):
    fpir: float
    today: ThresholdOut
    grown: ThresholdOut = Field(description="At ten times today's size, for strangers as today's.")


class PointOut(BaseModel):
    similarity: float
    fpir: float
    low: float = Field(description="With 'high', the 95 % interval.")
    high: float
    extrapolated: bool


class CheckOut(BaseModel):
    """Subjects left out of the gallery and searched for: how many reach the threshold of ``fpir``."""

    fpir: float
    probes: int
    expected: float
    observed: int


class GalleryRiskOut(BaseModel):
    gallery: str
    fusion: Fusion
    subjects: int = Field(description="Enrolled, with a template, when the evidence was derived.")
    risk: dict[str, float] = Field(description="The gallery's own.")
    threshold: float
    review_threshold: float
    evidence: EvidenceOut
    targets: list[TargetOut]
    curve: list[PointOut]
    check: CheckOut | None


class AuditLineOut(BaseModel):
    """Something that was done, or refused."""

    chain: Literal["gallery", "service"]
    number: int = Field(description="In its chain.")
    at: datetime
    event: str
    outcome: str
    actor: str = Field(description="'key:ID', 'operator', 'anonymous', or 'service' of itself.")
    request_id: str | None = Field(description="As in the answer's X-Request-Id.")
    gallery: str | None
    subject: str | None = Field(description="A keyed hash of the id: list with 'subject' for the lines of one person.")
    details: dict[str, Any]
    hash: str


class AuditOut(BaseModel):
    lines: list[AuditLineOut]
    next: str | None = Field(description="Send as 'cursor' for the next page; null on the last.")


class JobOut(BaseModel):
    """Long work. ``done`` of ``total`` items (null: not counted yet), ``failed`` of them with a problem."""

    id: str
    kind: str
    gallery: str
    state: JobState
    cancelling: bool = Field(description="Somebody asked to cancel it, and it is coming to the end of an item.")
    total: int | None
    done: int
    failed: int
    counts: dict[str, int] = Field(description="Items by what became of them.")
    rate: float | None = Field(description="Items a second, of the time that was worked on it.")
    remaining_s: float | None = Field(description="At that rate; null once it is finished.")
    details: dict[str, Any]
    problem: Problem | None = Field(description="Why it failed.")
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, job: Job) -> JobOut:
        progress, active = job.progress, job.state in ("queued", "running")
        rate = progress.done / progress.seconds if progress.done and progress.seconds else None
        left = None if rate is None or progress.total is None or not active else (progress.total - progress.done) / rate
        return cls(
            id=job.id,
            kind=job.kind,
            gallery=job.gallery,
            state=job.state,
            cancelling=job.cancel and job.state == "running",
            total=progress.total,
            done=progress.done,
            failed=progress.failed,
            counts=progress.counts,
            rate=None if rate is None else round(rate, 2),
            remaining_s=None if left is None else round(left, 1),
            details=progress.details,
            problem=None if job.problem is None else Problem(**job.problem),
            created_at=job.created_at,
            updated_at=job.updated_at,
        )


class JobsOut(BaseModel):
    jobs: list[JobOut]
    next: str | None = Field(description="Send as 'cursor' for the next page; null on the last.")


class JobItemOut(BaseModel):
    item: str
    problem: Problem | None
    at: datetime

    @classmethod
    def of(cls, item: JobItem) -> JobItemOut:
        return cls(item=item.item, at=item.at, problem=None if item.problem is None else Problem(**item.problem))


class JobItemsOut(BaseModel):
    items: list[JobItemOut]
    next: str | None = Field(description="Send as 'cursor' for the next page; null on the last.")


class ModelOut(BaseModel):
    model: str
    display_name: str
    recogniser: str = Field(description="Fingerprint: vectors compare only where it is equal.")
    dimension: int
    calibrated: bool
    detection: NetworkOut
    recognition: NetworkOut
    liveness: NetworkOut | None = Field(None, description="Of KITH_PACK, where it has such a model.")
    metrics: dict[str, Any]


class ModelsOut(ModelOut):
    """That of KITH_PACK, and in ``models`` all whose recognisers are served, it first."""

    models: list[ModelOut]


class HealthOut(BaseModel):
    status: Literal["ok"] = "ok"
    version: str


class ImportRefusalOut(BaseModel):
    item: int = Field(description="The line of the file, in Parquet the row, from 1.")
    error: Problem


class ImportOut(BaseModel):
    gallery: str
    items: int = Field(description="Read.")
    subjects: int = Field(description="Created.")
    templates: int = Field(description="Stored, all on disk.")
    present: int = Field(description="Templates that were there already.")
    refused: int
    refusals: list[ImportRefusalOut] = Field(description="The first thousand.")
