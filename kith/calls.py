"""Description of every API call: the methods of both clients, with their names, parameters and docstrings."""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack

from httpx2 import ServerSentEvent

from kith.methods import ONLY_NEW, call, each, one, pages, photo_call, stream
from kith.options import (
    ArchiveOptions,
    Checks,
    FilterOptions,
    GalleryOptions,
    Risk,
    SubjectChanges,
)
from kith.photos import Photo, Url, Vector, encode_photo, is_photo, to_floats
from kith.requests import (
    LAST_EVENT_ID,
    Archive,
    Call,
    FileStream,
    Pages,
    drop_none,
    json_call,
    list_call,
    path_segment,
    texts,
)
from kith.wire.albums import AlbumEnrolledOut, AlbumFaceOut, AlbumGroupOut, AlbumOut
from kith.wire.audit import AuditLineOut, AuditOut
from kith.wire.common import Detail, EventType, FaceChoice, FacesChoice, IdentifyOutcome, JobState, Scope
from kith.wire.crops import CropsOut
from kith.wire.erasures import DeletedOut, ReceiptOut
from kith.wire.events import EventOut
from kith.wire.faces import FacesOut
from kith.wire.fields import Page
from kith.wire.galleries import GalleryOut
from kith.wire.hygiene import FindingOut, HygieneOut
from kith.wire.identification import IdentifyOut
from kith.wire.jobs import JobItemOut, JobOut
from kith.wire.keys import DAY_S, CreatedKeyOut, KeyOut
from kith.wire.migration import MigrationOut
from kith.wire.risk import GalleryRiskOut
from kith.wire.status import HealthOut, ModelsOut, StatusOut
from kith.wire.strangers import StrangerMergedOut, StrangerOut
from kith.wire.subjects import DecoyOut, EnrollOut, MergedOut, SubjectOut, TemplateOut
from kith.wire.transfer import ImportOut
from kith.wire.verification import VerifyOut
from kith.wire.webhooks import (
    CreatedWebhookOut,
    DeletedWebhookOut,
    WebhookOut,
    WebhookReplayOut,
    WebhookTestOut,
)

Side: TypeAlias = "Photo | Url | Vector | tuple[str, str]"
"""One side of a verification: a photo, a photo's URL, an embedding, or an enrolled subject as (gallery, subject)."""
PAGE_ITEMS: Final = 1000


class Calls:
    """The calls of the API. The decorators make each description a method that sends it."""

    # Faces

    @photo_call("/v1/detect")
    def detect(self, *photos: Photo, urls: Sequence[str] = (), detail: Detail | None = None) -> Call[FacesOut]:
        """Detect faces: boxes, landmarks and quality. The server fetches the photos at ``urls``, numbered last.

        ``detail`` is the effort: "medium" also finds faces in sideways photos and faces that fill the photo, "high"
        also small faces in large photos (docs/models.md); default: the server's."""

    @photo_call("/v1/embed")
    def embed(
        self, *photos: Photo, urls: Sequence[str] = (), model: str | None = None, detail: Detail | None = None
    ) -> Call[FacesOut]:
        """Detect and embed faces. Each ``embedding`` is a list of d floats of unit length.

        ``model`` is a pack's name or its recognizer's fingerprint; default: the server's pack. ``detail`` is the effort
        of face detection, as in :func:`detect`."""

    @one
    def verify(
        self,
        a: Side,
        b: Side,
        *,
        risk: Risk | None = None,
        model: str | None = None,
        recognizer: str | None = None,
        require_liveness: bool | None = None,
        detail: Detail | None = None,
    ) -> Call[VerifyOut]:
        """Compare two sides: are they the same person? One may be a subject: a tuple of gallery and id.

        ``recognizer`` is the fingerprint of the recognizer that made the embeddings, as :func:`embed` returns it.
        ``detail`` is the effort of face detection, as in :func:`detect`; default: the server's, at least "medium"."""
        options = drop_none(risk=risk, model=model, require_liveness=require_liveness, detail=detail)
        files: list[tuple[str, tuple[str, bytes]]] = []
        for name, side in (("a", a), ("b", b)):
            if isinstance(side, Url):
                options[name] = {"url": side.address}
            elif isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], str):
                options[name] = {"subject": {"gallery": side[0], "subject": side[1]}}
            elif is_photo(side):
                files.append((name, ("photo", encode_photo(side))))  # type: ignore[arg-type]
            else:
                options[name] = {"embedding": to_floats(side)} | drop_none(recognizer=recognizer)  # type: ignore[arg-type]
        if not files:
            return json_call(VerifyOut, "POST", "/v1/verify", json=options)
        return json_call(VerifyOut, "POST", "/v1/verify", files=files, data={"request": json.dumps(options)})

    # Galleries

    @one
    def create_gallery(
        self,
        name: str,
        *,
        exist_ok: bool = False,
        **settings: Unpack[GalleryOptions],
    ) -> Call[GalleryOut]:
        """Create a gallery. :class:`kith.options.GalleryOptions` lists the settings.

        With ``exist_ok``, return an existing gallery as it is."""
        body = {"name": name, **settings}
        call = json_call(GalleryOut, "POST", "/v1/galleries", repeatable=exist_ok, json=body)
        if not exist_ok:
            return call
        return replace(call, instead={"gallery_exists": json_call(GalleryOut, "GET", _path(name))})

    @call("GET", "/v1/galleries/{name}")
    def gallery(self, name: str) -> Call[GalleryOut]:
        """Return a gallery: its settings, counts and drift."""

    @pages("/v1/galleries")
    def galleries(self) -> Pages[GalleryOut]:
        """List all galleries by name."""

    @one
    def update_gallery(
        self, name: str, *, confirm: int | None = None, **settings: Unpack[GalleryOptions]
    ) -> Call[GalleryOut]:
        """Change settings of a gallery. Omitted settings keep their value.

        ``confirm``: the number in the error ``retention_unconfirmed``, which a shorter ``retention_days`` raises if it
        would erase more than a tenth of the gallery."""
        return json_call(GalleryOut, "PATCH", _path(name), json=settings, params=drop_none(confirm=confirm))

    @call("DELETE", "/v1/galleries/{name}")
    def delete_gallery(self, name: str) -> Call[DeletedOut]:
        """Erase a gallery with all subjects. Return the receipt."""

    @call("GET", "/v1/galleries/{name}/hygiene")
    def hygiene(self, name: str, limit: int = 100, cursor: str | None = None) -> Call[HygieneOut]:
        """Return one page of likely enrollment errors: duplicates, mislabeled templates and lookalikes.

        ``cursor`` is ``next`` of the previous page."""

    @pages("/v1/galleries/{name}/hygiene", limit=PAGE_ITEMS)
    def findings(self, name: str) -> Pages[FindingOut]:
        """List all findings of :func:`hygiene`, the most important first."""

    @call("GET", "/v1/galleries/{gallery}/risk")
    def risk(self, gallery: str, *fpir: float) -> Call[GalleryRiskOut]:
        """Return the threshold for each FPIR, today and at ten times the size, and the evidence for it."""

    @call("POST", "/v1/galleries/{gallery}/calibrate", in_query=True)
    def calibrate(self, gallery: str, *fpir: float) -> Call[GalleryRiskOut]:
        """Recalibrate a gallery's risk from all its templates, and return the result."""

    @each
    def audit(
        self,
        name: str | None = None,
        *,
        event: str | None = None,
        actor: str | None = None,
        since: str | None = None,
        until: str | None = None,
        subject: str | None = None,
        gallery: str | None = None,
    ) -> Pages[AuditLineOut]:
        """List the audit log of one gallery, or of all, latest first.

        ``since`` and ``until`` are ISO 8601 times. ``subject`` needs ``name``. ``gallery`` names a deleted gallery."""
        path = "/v1/audit" if name is None else f"{_path(name)}/audit"
        chosen = drop_none(event=event, actor=actor, since=since, until=until, subject=subject, gallery=gallery)
        return list_call(AuditOut, path, chosen)

    # Migration to another recognizer

    @call("POST", "/v1/galleries/{gallery}/migrate")
    def migrate(self, gallery: str, to: str, force: bool = False) -> Call[MigrationOut]:
        """Migrate to another served pack, given by name or recognizer fingerprint. A job embeds, then switches."""

    @call("GET", "/v1/galleries/{gallery}/migrate")
    def migration(self, gallery: str) -> Call[MigrationOut]:
        """Return the progress of a migration."""

    @call("POST", "/v1/galleries/{gallery}/migrate/roll-back", repeatable=False)
    def roll_back(self, gallery: str) -> Call[MigrationOut]:
        """Let the previous recognizer answer requests again, or stop the migration's job."""

    @call("POST", "/v1/galleries/{gallery}/migrate/finish", repeatable=False)
    def finish_migration(self, gallery: str, force: bool = False) -> Call[MigrationOut]:
        """Delete the vectors of the recognizer that no longer answers."""

    # Import and export

    @one
    def import_gallery(
        self,
        gallery: str,
        file: Path | str,
        *,
        create: bool = False,
        recognizer: str | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> Call[ImportOut]:
        """Import a file (.ndjson, .ndjson.gz). Existing templates are skipped, so an import can be repeated.

        ``progress`` is called with the number of bytes of each sent chunk; a retry counts none twice."""
        path = Path(file)
        headers = {"Content-Type": "application/x-ndjson"} | (
            {"Content-Encoding": "gzip"} if path.suffix == ".gz" else {}
        )
        return Call(
            "POST",
            f"{_path(gallery)}/import",
            ImportOut.model_validate_json,
            {"params": {"create": create} | drop_none(recognizer=recognizer), "headers": headers},
            stream=FileStream(path, progress),
            long_running=True,
        )

    @stream
    def export_gallery(self, gallery: str, *, embeddings: bool = True, crops: bool = False) -> Call[bytes]:
        """Stream a consistent snapshot of a gallery as the chunks of an NDJSON file."""
        params = {"embeddings": embeddings, "crops": crops}
        return Call("GET", f"{_path(gallery)}/export", bytes, {"params": params})

    # Subjects and templates

    @one
    def put_subject(
        self,
        gallery: str,
        subject: str,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        *,
        only_new: bool = False,
    ) -> Call[SubjectOut]:
        """Create or replace a subject. With ``only_new``, refuse to replace one (``subject_exists``)."""
        body = {"name": name, "metadata": dict(metadata or {}), "tags": texts("tags", tags)}
        # With the condition, a retry would be refused because of what the first attempt wrote.
        headers = ONLY_NEW if only_new else {}
        return json_call(SubjectOut, "PUT", _path(gallery, subject), not only_new, json=body, headers=headers)

    @one
    def update_subject(self, gallery: str, subject: str, **changes: Unpack[SubjectChanges]) -> Call[SubjectOut]:
        """Change a subject's name, metadata or tags. Omitted fields keep their value."""
        return json_call(SubjectOut, "PATCH", _path(gallery, subject), json=changes)

    @call("GET", "/v1/galleries/{gallery}/subjects/{subject}")
    def subject(self, gallery: str, subject: str) -> Call[SubjectOut]:
        """Return a subject."""

    @each
    def subjects(
        self,
        gallery: str,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        q: str | None = None,
    ) -> Pages[SubjectOut]:
        """List the subjects that have all tags and all metadata entries, oldest first.

        ``q`` has words, or parts of words, that must all be in the id or name, whatever the case and accents."""
        chosen = {"tag": texts("tags", tags)} | drop_none(
            metadata=json.dumps(dict(metadata)) if metadata else None, q=q
        )
        return list_call(Page[SubjectOut], f"{_path(gallery)}/subjects", chosen)

    @call("DELETE", "/v1/galleries/{gallery}/subjects/{subject}")
    def delete_subject(self, gallery: str, subject: str) -> Call[DeletedOut]:
        """Erase a subject. Return the receipt."""

    @call("POST", "/v1/galleries/{gallery}/subjects/{subject}/merge")
    def merge_subject(self, gallery: str, subject: str, into: str) -> Call[MergedOut]:
        """Move all templates of a subject to ``into``, then erase the subject. Return the receipt."""

    @call("GET", "/v1/galleries/{gallery}/subjects/{subject}/export")
    def export_subject(self, gallery: str, subject: str) -> Call[dict[str, Any]]:
        """Return all stored data about one subject."""

    @pages("/v1/galleries/{gallery}/strangers")
    def strangers(self, gallery: str) -> Pages[StrangerOut]:
        """List the strangers that a gallery remembers, the latest first."""

    @call("GET", "/v1/galleries/{gallery}/strangers/{stranger}")
    def stranger(self, gallery: str, stranger: str) -> Call[StrangerOut]:
        """Return a remembered stranger."""

    @call("POST", "/v1/galleries/{gallery}/strangers/{stranger}/promote", repeatable=False)
    def promote_stranger(self, gallery: str, stranger: str, subject: str, name: str | None = None) -> Call[MergedOut]:
        """Move a stranger's templates to a new or existing subject, then forget the stranger.

        ``name`` is for a subject without a name."""

    @call("POST", "/v1/galleries/{gallery}/strangers/{stranger}/merge", repeatable=False)
    def merge_stranger(self, gallery: str, stranger: str, into: str) -> Call[StrangerMergedOut]:
        """Merge a stranger into another one that is the same person."""

    @call("DELETE", "/v1/galleries/{gallery}/strangers/{stranger}")
    def forget_stranger(self, gallery: str, stranger: str) -> Call[DeletedOut]:
        """Erase a stranger. Return the receipt."""

    @call("DELETE", "/v1/galleries/{gallery}/strangers")
    def forget_strangers(self, gallery: str) -> Call[DeletedOut]:
        """Erase all strangers of a gallery. Return the receipt."""

    @call("GET", "/v1/galleries/{gallery}/strangers/{stranger}/export")
    def export_stranger(self, gallery: str, stranger: str) -> Call[dict[str, Any]]:
        """Return all stored data about a stranger."""

    @one
    def crops(self, gallery: str, crops: Sequence[Mapping[str, str]]) -> Call[list[bytes | None]]:
        """Return many stored face crops as WebP, None if none is stored, with one line in the audit.

        Each of ``crops`` (at most 200) has the key "subject" or "stranger", or the keys "subject" and
        "template", or "album" and "face"."""
        return Call("POST", f"{_path(gallery)}/crops", _images, {"json": {"crops": list(crops)}})

    @pages("/v1/galleries/{gallery}/erasures")
    def erasures(self, gallery: str, subject: str | None = None) -> Pages[ReceiptOut]:
        """List the receipts of erasures, latest first, optionally of one subject."""

    @photo_call("/v1/galleries/{gallery}/subjects/{subject}/templates", once=True)
    def enroll(
        self,
        gallery: str,
        subject: str,
        *photos: Photo,
        urls: Sequence[str] = (),
        embeddings: Sequence[Vector] = (),
        recognizer: str | None = None,
        face: FaceChoice | None = None,
        detail: Detail | None = None,
        allow_duplicate: bool | None = None,
        allow_inconsistent: bool | None = None,
        allow_low_quality: bool | None = None,
        allow_not_live: bool | None = None,
        only_new: bool = False,
        idempotency_key: str | None = None,
    ) -> Call[EnrollOut]:
        """Enroll templates of a subject from photos or embeddings.

        A single rejected photo raises. With several, each has its own result. ``recognizer`` made the ``embeddings``.
        ``detail`` is the effort of face detection, as in :func:`detect`; default: the server's, at least "medium".
        ``only_new`` refuses to extend an existing subject. ``idempotency_key`` makes a repeated request enroll once;
        default: a random one."""

    @call("GET", "/v1/galleries/{gallery}/subjects/{subject}/templates/{template}")
    def template(self, gallery: str, subject: str, template: str) -> Call[TemplateOut]:
        """Return a template, without its vector."""

    @pages("/v1/galleries/{gallery}/subjects/{subject}/templates")
    def templates(self, gallery: str, subject: str) -> Pages[TemplateOut]:
        """List the templates of a subject, oldest first."""

    @call("PATCH", "/v1/galleries/{gallery}/subjects/{subject}/templates/{template}", repeatable=False, to="subject")
    def move_template(self, gallery: str, subject: str, template: str, to: str) -> Call[Page[TemplateOut]]:
        """Move a template to the subject ``to``. Return the first page of that subject's templates."""

    @photo_call("/v1/galleries/{gallery}/subjects/{subject}/decoys")
    def add_decoy(
        self,
        gallery: str,
        subject: str,
        photo: Photo | None = None,
        *,
        url: str | None = None,
        embedding: Vector | None = None,
        recognizer: str | None = None,
        face: FaceChoice | None = None,
        detail: Detail | None = None,
        allow_low_quality: bool | None = None,
    ) -> Call[DecoyOut]:
        """State that the person of a photo or an embedding is not the subject.

        A face that is more similar to it than to the subject is not identified as the subject any more. ``recognizer``
        made the ``embedding``. The same picture is stored once, so a repeated call returns the same decoy."""

    @call("GET", "/v1/galleries/{gallery}/subjects/{subject}/decoys")
    def decoys(self, gallery: str, subject: str) -> Call[list[DecoyOut]]:
        """Return the decoys of a subject, people who were mistaken for it, oldest first."""

    @call("DELETE", "/v1/galleries/{gallery}/subjects/{subject}/decoys/{decoy}")
    def delete_decoy(self, gallery: str, subject: str, decoy: str) -> Call[DeletedOut]:
        """Undo a correction: erase a decoy. Return the receipt."""

    @call("DELETE", "/v1/galleries/{gallery}/subjects/{subject}/templates/{template}")
    def delete_template(self, gallery: str, subject: str, template: str) -> Call[DeletedOut]:
        """Erase a template. Return the receipt."""

    @photo_call("/v1/galleries/{gallery}/identify")
    def identify(
        self,
        gallery: str,
        *photos: Photo,
        urls: Sequence[str] = (),
        embeddings: Sequence[Vector] = (),
        recognizer: str | None = None,
        risk: Risk | None = None,
        faces: FacesChoice | None = None,
        detail: Detail | None = None,
        top_k: int | None = None,
        filter: FilterOptions | None = None,  # noqa: A002 - the API's name
        check_quality: bool | None = None,
        one_face_per_person: bool | None = None,
    ) -> Call[IdentifyOut]:
        """Search a gallery for each face of the photos and each embedding.

        ``risk`` is the accepted rate of strangers identified as a subject; default: the gallery's. ``filter`` limits
        the searched subjects. ``detail`` is the effort of face detection, as in :func:`detect`. ``one_face_per_person``
        identifies a person in at most one face of a photo; default: the gallery's setting."""

    # Jobs

    @one
    def enroll_archive(
        self,
        gallery: str,
        archive: Path | str | Archive,
        **options: Unpack[ArchiveOptions],
    ) -> Call[JobOut]:
        """Upload a zip, tar, tar.gz or tar.zst of SUBJECT/PHOTO files. Return the job that enrolls it.

        See ``wait_for``. A photo is enrolled once, however often it is uploaded."""
        return _upload(f"{_path(gallery)}/enrollments", archive, options)

    @call("GET", "/v1/jobs/{job}")
    def job(self, job: str) -> Call[JobOut]:
        """Return a job."""

    @pages("/v1/jobs", states="state")
    def jobs(self, gallery: str | None = None, states: Iterable[JobState] = ()) -> Pages[JobOut]:
        """List jobs, latest first, optionally of one gallery and in some states."""

    @pages("/v1/jobs/{job}/items", limit=PAGE_ITEMS)
    def job_items(self, job: str, failed: bool = False) -> Pages[JobItemOut]:
        """List the finished items of a job, or only the failed ones."""

    @call("POST", "/v1/jobs/{job}/cancel")
    def cancel_job(self, job: str) -> Call[JobOut]:
        """Cancel a job, which stops after its current item. Completed items are kept."""

    # Albums

    @one
    def create_album(
        self,
        gallery: str,
        archive: Path | str | Archive,
        risk: float | None = None,
        *,
        detail: Detail | None = None,
    ) -> Call[JobOut]:
        """Upload an archive of photos. Return the job that groups their faces into people: its id is the album's.

        ``risk`` is the accepted share of pairs of faces in one group that are two people; default: 0.01. ``detail`` as
        in :func:`detect`. See ``wait_for``."""
        return _upload(f"{_path(gallery)}/albums", archive, {"risk": risk, "detail": detail}, repeatable=False)

    @call("GET", "/v1/galleries/{gallery}/albums")
    def albums(self, gallery: str) -> Call[list[AlbumOut]]:
        """Return the albums of a gallery, latest first."""

    @call("GET", "/v1/galleries/{gallery}/albums/{album}")
    def album(self, gallery: str, album: str) -> Call[AlbumOut]:
        """Return an album."""

    @call("DELETE", "/v1/galleries/{gallery}/albums/{album}")
    def delete_album(self, gallery: str, album: str) -> Call[DeletedOut]:
        """Erase an album and its job. Return the receipt."""

    @pages("/v1/galleries/{gallery}/albums/{album}/groups")
    def album_groups(self, gallery: str, album: str, single: bool | None = None) -> Pages[AlbumGroupOut]:
        """List the groups of an album, the largest first. ``single``: only those of one face, or only the others."""

    @pages("/v1/galleries/{gallery}/albums/{album}/groups/{group}/faces")
    def album_faces(self, gallery: str, album: str, group: str) -> Pages[AlbumFaceOut]:
        """List the faces of a group, the most certain first."""

    @call("POST", "/v1/galleries/{gallery}/albums/{album}/groups/{group}/merge", repeatable=False)
    def merge_album_group(self, gallery: str, album: str, group: str, into: str) -> Call[AlbumGroupOut]:
        """Merge a group into another one that is the same person. Return the remaining group."""

    @call("POST", "/v1/galleries/{gallery}/albums/{album}/groups/{group}/split", repeatable=False)
    def split_album_group(self, gallery: str, album: str, group: str, faces: Sequence[str]) -> Call[AlbumGroupOut]:
        """Move faces that are another person to a new group. Return it."""

    @call("POST", "/v1/galleries/{gallery}/albums/{album}/groups/{group}/enroll", repeatable=False)
    def enroll_album_group(
        self, gallery: str, album: str, group: str, subject: str, name: str | None = None, **checks: Unpack[Checks]
    ) -> Call[AlbumEnrolledOut]:
        """Enroll the faces of a group as a subject; ``name`` is for one without. They leave the album; refused ones
        stay."""

    # API keys

    @call("POST", "/v1/keys", repeatable=False)
    def create_key(
        self,
        name: str,
        scopes: Iterable[Scope],
        *,
        galleries: Sequence[str] | None = None,
        expires_at: datetime | None = None,
    ) -> Call[CreatedKeyOut]:
        """Create an API key, for all galleries by default. Only this response contains its ``token``."""

    @call("GET", "/v1/keys/{key}")
    def api_key(self, key: str) -> Call[KeyOut]:
        """Return an API key by its id."""

    @pages("/v1/keys")
    def api_keys(self, ended: bool = False) -> Pages[KeyOut]:
        """List the API keys, oldest first. ``ended`` includes revoked and expired keys."""

    @call("DELETE", "/v1/keys/{key}")
    def revoke_key(self, key: str) -> Call[KeyOut]:
        """Revoke an API key."""

    @call("POST", "/v1/keys/{key}/rotate", repeatable=False)
    def rotate_key(self, key: str, overlap_s: int = DAY_S) -> Call[CreatedKeyOut]:
        """Replace an API key by one with the same permissions. Only this response contains its ``token``: save it.

        The old one remains valid for ``overlap_s`` seconds."""

    # Webhooks

    @call("POST", "/v1/webhooks", repeatable=False)
    def create_webhook(
        self,
        url: str,
        *,
        name: str | None = None,
        types: Sequence[EventType] | None = None,
        galleries: Sequence[str] | None = None,
        outcomes: Sequence[IdentifyOutcome] | None = None,
        min_risk: float | None = None,
    ) -> Call[CreatedWebhookOut]:
        """Create a webhook for the events from now on. Only this response contains its ``secret``: save it.

        The other arguments choose events, as in :func:`events`."""

    @pages("/v1/webhooks")
    def webhooks(self) -> Pages[WebhookOut]:
        """List the webhooks, oldest first."""

    @call("GET", "/v1/webhooks/{webhook}")
    def webhook(self, webhook: str) -> Call[WebhookOut]:
        """Return a webhook by its id."""

    @call("DELETE", "/v1/webhooks/{webhook}")
    def delete_webhook(self, webhook: str) -> Call[DeletedWebhookOut]:
        """Delete a webhook. Events that wait for it are not sent."""

    @call("POST", "/v1/webhooks/{webhook}/test", repeatable=False)
    def test_webhook(self, webhook: str) -> Call[WebhookTestOut]:
        """Send an event of the type ``test`` now, once, and return the receiver's answer."""

    @call("POST", "/v1/webhooks/{webhook}/replay")
    def replay_webhook(self, webhook: str) -> Call[WebhookReplayOut]:
        """Send all stored events to a webhook again, with the same ids, and switch it on if it is off."""

    @stream
    def events(
        self,
        after: str | None = None,
        *,
        types: Sequence[EventType] | None = None,
        galleries: Sequence[str] | None = None,
        outcomes: Sequence[IdentifyOutcome] | None = None,
        min_risk: float | None = None,
    ) -> Call[EventOut]:
        """Follow events: from now on, or ``after`` the ``position`` of a received one. The iterator has no end.

        It connects again, without loss, whenever the connection breaks. ``min_risk`` is the minimum false alarm
        probability of decisions. Default: all events that the key may read. Raise ``events_expired`` if events after
        the position are no longer stored (docs/events.md)."""
        params = drop_none(type=types, gallery=galleries, outcome=outcomes, min_risk=min_risk)
        arguments = {"params": params, "headers": drop_none(**{LAST_EVENT_ID: after})}
        return Call("GET", "/v1/events", _event, arguments)

    # Server

    @call("GET", "/v1/models")
    def model(self, *fpir: float) -> Call[ModelsOut]:
        """Return the pack of KITH_PACK and all other served packs, with their misses at these FPIRs.

        Default: the rates of the presets."""

    @call("GET", "/healthz")
    def health(self) -> Call[HealthOut]:
        """Check that the process responds."""

    @call("GET", "/readyz")
    def ready(self) -> Call[HealthOut]:
        """Check that the server can serve requests."""

    @call("GET", "/v1/status")
    def status(self) -> Call[StatusOut]:
        """Return the server's readiness checks, queues, index lag and disk space."""

    @call("GET", "/metrics")
    def metrics(self) -> Call[str]:
        """Return the metrics in the text format of Prometheus."""


def _event(event: ServerSentEvent) -> EventOut:
    return EventOut.model_validate(json.loads(event.data) | {"position": event.id})


def _images(body: bytes) -> list[bytes | None]:
    images = [crop.image for crop in CropsOut.model_validate_json(body).data]
    return [None if image is None else b64decode(image) for image in images]


def _path(gallery: str, subject: str | None = None) -> str:
    base = f"/v1/galleries/{path_segment(gallery)}"
    return base if subject is None else f"{base}/subjects/{path_segment(subject)}"


def _upload(
    path: str, archive: Path | str | Archive, options: Mapping[str, Any], repeatable: bool = True
) -> Call[JobOut]:
    body = FileStream(Path(archive)) if isinstance(archive, Path | str) else archive
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.size)}
    arguments = {"headers": headers, "params": drop_none(**options)}
    return Call("POST", path, JobOut.model_validate_json, arguments, body, repeatable)
