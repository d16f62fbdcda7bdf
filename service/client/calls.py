"""Every call of the API, described once for both clients: what it is given, what is sent, and what is answered.

A method of :class:`service.client.Kith` has the name, the parameters and the document of the function here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter

from service.api.key_schemas import DAY_S, KeyOut, KeysOut, NewKeyOut
from service.api.migration_schemas import MigrationOut
from service.api.schemas import (
    AuditLineOut,
    AuditOut,
    DeletedOut,
    EnrolOut,
    FacesOut,
    FindingOut,
    GalleriesOut,
    GalleryOut,
    GalleryRiskOut,
    GalleryStatsOut,
    HealthOut,
    HygieneOut,
    IdentifyOut,
    ImportOut,
    JobItemOut,
    JobItemsOut,
    JobOut,
    JobsOut,
    MergedOut,
    ModelsOut,
    ReceiptOut,
    ReceiptsOut,
    RetentionAppliedOut,
    RetentionOut,
    SubjectOut,
    SubjectsOut,
    TemplateOut,
    TemplatesOut,
    VerdictOut,
    VerifyOut,
)
from service.api.status_schemas import StatusOut
from service.client.photos import Photo, Url, Vector, is_photo, numbers_of, payload_of
from service.client.requests import Archive, Call, FileStream, Pages, given, part, with_photos
from service.decision import FaceChoice
from service.security.keys import Scope

Answer = TypeVar("Answer", bound=BaseModel)
Page = TypeVar("Page", bound=BaseModel)
Item = TypeVar("Item")
Side: TypeAlias = "Photo | Url | Vector | tuple[str, str]"
"""Of a verification: a photo, one that the server fetches, an embedding, or an enrolled subject (gallery, subject)."""
Risk: TypeAlias = Mapping[str, Any]
"""One of {"fpir": 0.001}, {"fmr": 0.001}, {"preset": "strict"}, {"threshold": 0.5}."""


# Faces


def detect(*photos: Photo, urls: Sequence[str] = ()) -> Call[FacesOut]:
    """Find faces: boxes, landmarks, quality. ``urls``, here and elsewhere: of photos that the server fetches, which
    count after the others."""
    return _call(FacesOut, "POST", "/v1/detect", **with_photos(photos, urls, {}))


def embed(*photos: Photo, urls: Sequence[str] = (), model: str | None = None) -> Call[FacesOut]:
    """As :func:`detect`, and each face has its ``embedding``, (d,) float32 of unit length. ``model``: of a pack, or its
    recogniser's fingerprint; default: the server's."""
    return _call(FacesOut, "POST", "/v1/embed", **with_photos(photos, urls, given(model=model)))


def verify(
    a: Side,
    b: Side,
    model: str | None = None,
    recogniser: str | None = None,
    require_liveness: bool | None = None,
    **risk: Any,
) -> Call[VerifyOut]:
    """Are these two the same person? ``risk`` is one of fmr=, fpir=, preset=, threshold=; ``model`` as in
    :func:`embed`; ``recogniser``: whose the embeddings are, as :func:`embed` says."""
    options = given(model=model, require_liveness=require_liveness) | ({"risk": risk} if risk else {})
    files: list[tuple[str, tuple[str, bytes]]] = []
    for name, side in (("a", a), ("b", b)):
        if isinstance(side, Url):
            options[name] = {"url": side.address}
        elif isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], str):
            options[name] = {"subject": {"gallery": side[0], "subject": side[1]}}
        elif is_photo(side):
            files.append((name, ("photo", payload_of(side))))  # type: ignore[arg-type]
        else:
            options[name] = {"embedding": numbers_of(side)} | given(recogniser=recogniser)  # type: ignore[arg-type]
    if not files:
        return _call(VerifyOut, "POST", "/v1/verify", json=options)
    return _call(VerifyOut, "POST", "/v1/verify", files=files, data={"request": json.dumps(options)})


# Galleries


def create_gallery(name: str, **settings: Any) -> Call[GalleryOut]:
    """``settings``: risk={"fpir": 0.001}, quality_gate={...}, review_factor, min_margin, keep_crops, index, recall,
    retention_days, liveness, fusion="max" | "mean_top_k" | "centroid" | "quality_weighted"."""
    return _call(GalleryOut, "POST", "/v1/galleries", repeatable=False, json={"name": name, **settings})


def gallery(name: str) -> Call[GalleryOut]:
    return _call(GalleryOut, "GET", _path(name))


def galleries() -> Pages[GalleryOut]:
    """By name."""
    return _pages(GalleriesOut, lambda page: (page.galleries, page.next), "/v1/galleries")


def update_gallery(name: str, **settings: Any) -> Call[GalleryOut]:
    """``settings``: as of :func:`create_gallery`; those that are not given stay."""
    return _call(GalleryOut, "PATCH", _path(name), json=settings)


def delete_gallery(name: str) -> Call[DeletedOut]:
    """With everybody in it; the answer has the receipt."""
    return _call(DeletedOut, "DELETE", _path(name))


def stats(name: str) -> Call[GalleryStatsOut]:
    """What serves a gallery's searches."""
    return _call(GalleryStatsOut, "GET", f"{_path(name)}/stats")


def retention(name: str) -> Call[RetentionOut]:
    """What is past a gallery's age, and whether its erasure waits for a confirmation."""
    return _call(RetentionOut, "GET", f"{_path(name)}/retention")


def apply_retention(name: str, templates: int, subjects: int) -> Call[RetentionAppliedOut]:
    """Erase what is past a gallery's age, if it is no more than this: the counts that :func:`retention` tells."""
    body = {"templates": templates, "subjects": subjects}
    return _call(RetentionAppliedOut, "POST", f"{_path(name)}/retention", repeatable=False, json=body)


def hygiene(name: str, limit: int = 100, cursor: str | None = None) -> Call[HygieneOut]:
    """Who seems enrolled twice, filed wrongly, or easily taken for another: how many, and a page of them. ``cursor``:
    ``next`` of the page before."""
    return _call(HygieneOut, "GET", f"{_path(name)}/hygiene", params={"limit": limit} | given(cursor=cursor))


def findings(name: str) -> Pages[FindingOut]:
    """All of :func:`hygiene`, the most pressing first."""
    return _pages(HygieneOut, lambda page: (page.findings, page.next), f"{_path(name)}/hygiene", {"limit": 1000})


def risk(gallery: str, *fpir: float) -> Call[GalleryRiskOut]:
    """Thresholds for these FPIRs (default: 0.1 to 0.0001), the curve between them, and the evidence."""
    return _call(GalleryRiskOut, "GET", f"{_path(gallery)}/risk", params=_targets(fpir))


def calibrate(gallery: str, *fpir: float) -> Call[GalleryRiskOut]:
    """As :func:`risk`, from evidence that is derived anew first."""
    return _call(GalleryRiskOut, "POST", f"{_path(gallery)}/calibrate", params=_targets(fpir))


def audit(gallery: str | None = None, /, **chosen: str | None) -> Pages[AuditLineOut]:
    """What was done, latest first; None: everywhere. ``chosen``: event, actor, since, until; subject, of a gallery;
    gallery's name, of one that was deleted."""
    path = "/v1/audit" if gallery is None else f"{_path(gallery)}/audit"
    return _pages(AuditOut, lambda page: (page.lines, page.next), path, given(**chosen))


# Moving to another recogniser


def migrate(gallery: str, to: str, on_sight: bool = False) -> Call[MigrationOut]:
    """Begin to move a gallery to another served pack (its name, or its recogniser's fingerprint), in its shadow."""
    body = {"to": to, "on_sight": on_sight}
    return _call(MigrationOut, "POST", _migrate(gallery), repeatable=False, json=body)


def migration(gallery: str) -> Call[MigrationOut]:
    """How far it is, and how the shadow would have answered."""
    return _call(MigrationOut, "GET", _migrate(gallery))


def cut_over(gallery: str, **options: Any) -> Call[MigrationOut]:
    """Let the new recogniser answer. ``options``: min_share=0.99, force, risk={"fpir": 0.001}."""
    return _call(MigrationOut, "POST", f"{_migrate(gallery)}/cut-over", repeatable=False, json=options)


def roll_back(gallery: str) -> Call[MigrationOut]:
    """Let the recogniser before answer again."""
    return _call(MigrationOut, "POST", f"{_migrate(gallery)}/roll-back", repeatable=False)


def finish_migration(gallery: str, force: bool = False) -> Call[MigrationOut]:
    """Keep only the vectors that answer now."""
    return _call(MigrationOut, "POST", f"{_migrate(gallery)}/finish", repeatable=False, json={"force": force})


# In and out


def import_gallery(
    gallery: str,
    file: Path | str,
    *,
    create: bool = False,
    recogniser: str | None = None,
    skip: int = 0,
    progress: Callable[[int], object] = lambda _: None,
) -> Call[ImportOut]:
    """Send a file (.ndjson, .ndjson.gz, .parquet); what is there already is passed over, so that a broken connection
    costs nothing but the sending. ``progress`` is told of bytes sent."""
    path = Path(file)
    headers = {"Content-Type": _media_type(path)} | ({"Content-Encoding": "gzip"} if path.suffix == ".gz" else {})
    return Call(
        "POST",
        f"{_path(gallery)}/import",
        ImportOut.model_validate_json,
        {"params": {"create": create, "skip": skip} | given(recogniser=recogniser), "headers": headers},
        pieces=FileStream(path, progress),
        patient=True,
    )


def export_gallery(
    gallery: str,
    kind: Literal["ndjson", "parquet"] = "ndjson",
    *,
    embeddings: bool = True,
    crops: bool = False,
) -> Call[bytes]:
    """Pieces of a file of the gallery at one moment."""
    params = {"format": kind, "embeddings": embeddings, "crops": crops}
    return Call("GET", f"{_path(gallery)}/export", bytes, {"params": params})


# Subjects and templates


def put_subject(
    gallery: str,
    subject: str,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Iterable[str] = (),
    *,
    only_new: bool = False,
) -> Call[SubjectOut]:
    """Create it, or write all this in the place of what was there; ``only_new``: refuse (``subject_exists``) if there
    is a subject of this id."""
    body = {"name": name, "metadata": dict(metadata or {}), "tags": list(tags)}
    # Sent again after its answer was lost, it would be refused for the subject that it made.
    return _call(SubjectOut, "PUT", _path(gallery, subject), not only_new, json=body, headers=_only_new(only_new))


def update_subject(gallery: str, subject: str, **changes: Any) -> Call[SubjectOut]:
    """``changes``: name, metadata, tags; those that are not given stay."""
    return _call(SubjectOut, "PATCH", _path(gallery, subject), json=changes)


def subject(gallery: str, subject: str) -> Call[SubjectOut]:
    return _call(SubjectOut, "GET", _path(gallery, subject))


def subjects(gallery: str, tags: Iterable[str] = (), metadata: Mapping[str, Any] | None = None) -> Pages[SubjectOut]:
    """The oldest first; those that have all the tags and all of the metadata."""
    chosen = {"tag": list(tags)} | given(metadata=json.dumps(dict(metadata)) if metadata else None)
    return _pages(SubjectsOut, lambda page: (page.subjects, page.next), f"{_path(gallery)}/subjects", chosen)


def delete_subject(gallery: str, subject: str) -> Call[DeletedOut]:
    """Erase a person; the answer has the receipt."""
    return _call(DeletedOut, "DELETE", _path(gallery, subject))


def merge_subject(gallery: str, subject: str, into: str) -> Call[MergedOut]:
    """File everything of a subject under ``into``, who is the same person, and erase it; the answer has the receipt."""
    return _call(MergedOut, "POST", f"{_path(gallery, subject)}/merge", json={"into": into})


def export_subject(gallery: str, subject: str) -> Call[dict[str, Any]]:
    """Everything that is held about one person."""
    return Call("GET", f"{_path(gallery, subject)}/export", _document)


def erasures(gallery: str, subject: str | None = None) -> Pages[ReceiptOut]:
    """Receipts of what was erased, latest first; of one subject, if given."""
    return _pages(
        ReceiptsOut, lambda page: (page.receipts, page.next), f"{_path(gallery)}/erasures", given(subject=subject)
    )


def verify_receipt(receipt: str) -> Call[VerdictOut]:
    """Whether a receipt holds."""
    return _call(VerdictOut, "GET", f"/v1/erasures/{part(receipt)}")


def enrol(
    gallery: str,
    subject: str,
    *photos: Photo,
    urls: Sequence[str] = (),
    embeddings: Sequence[Vector] = (),
    recogniser: str | None = None,
    face: FaceChoice | None = None,
    allow_duplicate: bool | None = None,
    allow_inconsistent: bool | None = None,
    allow_low_quality: bool | None = None,
    allow_not_live: bool | None = None,
    only_new: bool = False,
    idempotency_key: str | None = None,
) -> Call[EnrolOut]:
    """Give a subject templates of photos, or of ``embeddings`` (``recogniser``: whose they are, as :func:`embed` says).
    The answer to several says for each what became of it; a lone one refused raises. ``face="largest"``: of a photo of
    several. ``only_new``: as in :func:`put_subject`. ``idempotency_key``: of the request, which is done once however
    often it is sent; default: a new one."""
    options = given(
        recogniser=recogniser,
        face=face,
        allow_duplicate=allow_duplicate,
        allow_inconsistent=allow_inconsistent,
        allow_low_quality=allow_low_quality,
        allow_not_live=allow_not_live,
    )
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex} | _only_new(only_new)
    arguments = with_photos(photos, urls, options | _embeddings(embeddings), headers)
    return _call(EnrolOut, "POST", f"{_path(gallery, subject)}/templates", **arguments)


def template(gallery: str, subject: str, template: str) -> Call[TemplateOut]:
    return _call(TemplateOut, "GET", _template(gallery, subject, template))


def templates(gallery: str, subject: str) -> Pages[TemplateOut]:
    """The oldest first."""
    return _pages(TemplatesOut, lambda page: (page.templates, page.next), f"{_path(gallery, subject)}/templates")


def move_template(gallery: str, subject: str, template: str, to: str) -> Call[TemplatesOut]:
    """File a template under the subject ``to``; the answer is the first page of that one's templates."""
    path = _template(gallery, subject, template)
    return _call(TemplatesOut, "PATCH", path, repeatable=False, json={"subject": to})


def delete_template(gallery: str, subject: str, template: str) -> Call[DeletedOut]:
    return _call(DeletedOut, "DELETE", _template(gallery, subject, template))


def identify(
    gallery: str,
    *photos: Photo,
    urls: Sequence[str] = (),
    embeddings: Sequence[Vector] = (),
    recogniser: str | None = None,
    risk: Risk | None = None,
    faces: Literal["all", "largest"] | None = None,
    top_k: int | None = None,
    filter: Mapping[str, Any] | None = None,  # noqa: A002 - the API's word
    check_quality: bool | None = None,
) -> Call[IdentifyOut]:
    """Who is it? ``risk={"fpir": 0.001}``: how often a stranger may be called somebody; default: the gallery's.
    ``filter={"tags": [...], "metadata": {...}}``: who is asked after."""
    options = given(
        recogniser=recogniser,
        risk=None if risk is None else dict(risk),
        faces=faces,
        top_k=top_k,
        filter=None if filter is None else dict(filter),
        check_quality=check_quality,
    )
    arguments = with_photos(photos, urls, options | _embeddings(embeddings))
    return _call(IdentifyOut, "POST", f"{_path(gallery)}/identify", **arguments)


# Jobs


def enrol_archive(gallery: str, archive: Path | str | Archive, **options: Any) -> Call[JobOut]:
    """Send a zip, tar, tar.gz or tar.zst of PERSON/PHOTO; the answer is the job that enrols it: see ``wait_for``.

    ``options``: face, allow_duplicate, allow_inconsistent, allow_low_quality, allow_not_live, and strip=N (folders
    above the people's). It is not repeated by itself: sent twice it is another job, which finds the photos enrolled."""
    body = FileStream(Path(archive)) if isinstance(archive, Path | str) else archive
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.size)}
    arguments = {"headers": headers, "params": given(**options)}
    return Call("POST", f"{_path(gallery)}/enrolments", JobOut.model_validate_json, arguments, body, repeatable=False)


def job(job: str) -> Call[JobOut]:
    return _call(JobOut, "GET", f"/v1/jobs/{part(job)}")


def jobs(gallery: str | None = None, states: Iterable[str] = ()) -> Pages[JobOut]:
    """The latest first; of one gallery, in some states (queued, running, succeeded, failed, cancelled)."""
    return _pages(
        JobsOut, lambda page: (page.jobs, page.next), "/v1/jobs", {"state": list(states)} | given(gallery=gallery)
    )


def job_items(job: str, failed: bool = False) -> Pages[JobItemOut]:
    """What became of each item so far; only those with a problem, if ``failed``."""
    params = {"failed": failed, "limit": 1000}
    return _pages(JobItemsOut, lambda page: (page.items, page.next), f"/v1/jobs/{part(job)}/items", params)


def cancel_job(job: str) -> Call[JobOut]:
    """One that runs ends between two items: see ``wait_for``."""
    return _call(JobOut, "DELETE", f"/v1/jobs/{part(job)}")


# API keys


def create_key(name: str, scopes: Iterable[Scope], **options: Any) -> Call[NewKeyOut]:
    """``options``: galleries=[...] (default: all), expires_at, rate, burst. The answer's ``token`` is told once."""
    body = TypeAdapter(dict[str, Any]).dump_python({"name": name, "scopes": list(scopes), **options}, mode="json")
    return _call(NewKeyOut, "POST", "/v1/keys", repeatable=False, json=body)


def api_key(key: str) -> Call[KeyOut]:
    """``key``: its id."""
    return _call(KeyOut, "GET", _key(key))


def api_keys(ended: bool = False) -> Pages[KeyOut]:
    """The oldest first. ``ended``: also those that were revoked or have expired."""
    return _pages(KeysOut, lambda page: (page.keys, page.next), "/v1/keys", {"ended": ended})


def revoke_key(key: str) -> Call[KeyOut]:
    return _call(KeyOut, "DELETE", _key(key))


def rotate_key(key: str, overlap_s: int = DAY_S) -> Call[NewKeyOut]:
    """Another key in the place of one, which works on for ``overlap_s``."""
    return _call(NewKeyOut, "POST", f"{_key(key)}/rotate", repeatable=False, json={"overlap_s": overlap_s})


# The service


def model() -> Call[ModelsOut]:
    """The pack of KITH_PACK, and beside it all that are served."""
    return _call(ModelsOut, "GET", "/v1/models")


def health() -> Call[HealthOut]:
    """The process answers."""
    return _call(HealthOut, "GET", "/healthz")


def ready() -> Call[HealthOut]:
    """It can serve."""
    return _call(HealthOut, "GET", "/readyz")


def status() -> Call[StatusOut]:
    """What is right and what is not, for people: readiness, queues, sizes, lag, disk."""
    return _call(StatusOut, "GET", "/v1/status")


def metrics() -> Call[str]:
    """Prometheus' text."""
    return Call("GET", "/metrics", bytes.decode)


def _call(model: type[Answer], method: str, path: str, repeatable: bool = True, **arguments: Any) -> Call[Answer]:
    return Call(method, path, model.model_validate_json, arguments, repeatable=repeatable)


def _pages(
    model: type[Page],
    read: Callable[[Page], tuple[Sequence[Item], str | None]],
    path: str,
    params: Mapping[str, Any] | None = None,
) -> Pages[Item]:
    def page(cursor: str | None) -> Call[tuple[Sequence[Item], str | None]]:
        arguments = {"params": {**(params or {}), **given(cursor=cursor)}}
        return Call("GET", path, lambda answer: read(model.model_validate_json(answer)), arguments)

    return Pages(page)


def _only_new(only_new: bool) -> dict[str, str]:
    return {"If-None-Match": "*"} if only_new else {}


def _document(answer: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer)
    return document


def _embeddings(vectors: Sequence[Vector]) -> dict[str, Any]:
    return {"embeddings": [numbers_of(vector) for vector in vectors]} if len(vectors) else {}


def _media_type(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return "application/vnd.apache.parquet" if name.endswith(".parquet") else "application/x-ndjson"


def _path(gallery: str, subject: str | None = None) -> str:
    base = f"/v1/galleries/{part(gallery)}"
    return base if subject is None else f"{base}/subjects/{part(subject)}"


def _template(gallery: str, subject: str, template: str) -> str:
    return f"{_path(gallery, subject)}/templates/{part(template)}"


def _migrate(gallery: str) -> str:
    return f"{_path(gallery)}/migrate"


def _key(key: str) -> str:
    return f"/v1/keys/{part(key)}"


def _targets(fpir: tuple[float, ...]) -> dict[str, list[float]]:
    return {"fpir": list(fpir)} if fpir else {}
