"""A typed client of the service: ``Kith(url, api_key)``."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from urllib.parse import quote

import httpx2 as httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, RootModel

from service.api.key_schemas import DAY_S, KeyIn, KeyOut, KeysOut, NewKeyOut
from service.api.migration_schemas import MigrationOut
from service.api.schemas import (
    AuditLineOut,
    AuditOut,
    DeletedOut,
    EnrolOut,
    FacesOut,
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
    ModelsOut,
    ReceiptOut,
    ReceiptsOut,
    SubjectOut,
    SubjectsOut,
    TemplatesOut,
    VerdictOut,
    VerifyOut,
)
from service.security.keys import Scope

Photo = Path | str | bytes
Vector = NDArray[np.floating[Any]] | Sequence[float]
Answer = TypeVar("Answer", bound=BaseModel)
PIECE_BYTES = 1_000_000
RETRIED = frozenset({429, 503})
BESIDE_A_PHOTO = frozenset(
    {
        "allow_duplicate",
        "allow_inconsistent",
        "allow_low_quality",
        "allow_not_live",
        "check_quality",
        "face",
        "faces",
        "model",
        "recogniser",
        "risk",
        "top_k",
    }
)
"""Options that may stand in an address, which proxies write into their logs: not what is known of people."""


class KithClientError(Exception):
    """The service refused or failed. ``code`` is its stable code, ``problem`` the whole document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code", "unknown"))
        self.problem = dict(problem)
        sentences = [str(problem[part]).rstrip(".") + "." for part in ("detail", "remedy") if problem.get(part)]
        super().__init__(f"{self.code}: {' '.join(sentences)}")


class KithUnreachableError(KithClientError):
    """No answer: the server is not there, or the connection broke."""

    def __init__(self, url: str, cause: Exception) -> None:
        detail = f"no answer from {url} ({cause})"
        super().__init__(
            0,
            {
                "code": "unreachable",
                "detail": detail,
                "remedy": "Is a server running there, and does the address begin with http://?",
            },
        )


class Archive(Protocol):
    """Bytes that are sent as they are made, again if need be; ``size``: how many."""

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


class FileStream:
    """A file's bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            while block := file.read(PIECE_BYTES):
                yield block


class Kith:
    """Talks to one server. Busy answers (429, 503) and broken connections are tried again with growing pauses;
    enrolment is repeated only because it carries an idempotency key.

    Args:
        url: of the server, like http://127.0.0.1:8000.
        api_key: if the server asks for one.
        timeout_s: for each attempt.
        attempts: in all.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 4) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._attempts = attempts
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Faces

    def detect(self, *photos: Photo, urls: Sequence[str] = ()) -> FacesOut:
        """``urls``, here and elsewhere: of photos that the server fetches, which count after the others."""
        return self._send(FacesOut, "POST", "/v1/detect", **_photos(photos, urls))

    def embed(self, *photos: Photo, urls: Sequence[str] = (), model: str | None = None) -> FacesOut:
        """``model``: of a pack, or its recogniser's fingerprint; default: the server's."""
        return self._send(FacesOut, "POST", "/v1/embed", **_photos(photos, urls, {"model": model} if model else {}))

    def verify(
        self,
        a: Photo | Vector | tuple[str, str],
        b: Photo | Vector | tuple[str, str],
        model: str | None = None,
        recogniser: str | None = None,
        **risk: Any,
    ) -> VerifyOut:
        """Compare two of: a photo, an embedding, a (gallery, subject). ``risk`` is one of fmr=, fpir=, preset=,
        threshold=; ``model`` as in :meth:`embed`; ``recogniser``: whose the embeddings are, as :meth:`embed` says."""
        options: dict[str, Any] = {"risk": risk} if risk else {}
        if model is not None:
            options["model"] = model
        files: list[tuple[str, tuple[str, bytes]]] = []
        for name, side in (("a", a), ("b", b)):
            if isinstance(side, tuple):
                options[name] = {"subject": {"gallery": side[0], "subject": side[1]}}
            elif isinstance(side, Path | str | bytes):
                files.append((name, ("photo", _read(side))))
            else:
                whose = {} if recogniser is None else {"recogniser": recogniser}
                options[name] = {"embedding": _floats(side)} | whose
        if not files:
            return self._send(VerifyOut, "POST", "/v1/verify", json=options)
        return self._send(VerifyOut, "POST", "/v1/verify", files=files, data={"request": json.dumps(options)})

    # Galleries

    def create_gallery(self, name: str, **settings: Any) -> GalleryOut:
        """``settings``: risk={"fpir": 0.001}, quality_gate={...}, review_factor, min_margin, keep_crops,
        fusion="max" | "mean_top_k" | "centroid" | "quality_weighted"."""
        return self._send(GalleryOut, "POST", "/v1/galleries", json={"name": name, **settings})

    def gallery(self, name: str) -> GalleryOut:
        return self._send(GalleryOut, "GET", _path(name))

    def stats(self, name: str) -> GalleryStatsOut:
        return self._send(GalleryStatsOut, "GET", f"{_path(name)}/stats")

    def galleries(self) -> Iterator[GalleryOut]:
        cursor: str | None = None
        while True:
            page = self._send(GalleriesOut, "GET", "/v1/galleries", params=_cursor(cursor))
            yield from page.galleries
            if (cursor := page.next) is None:
                return

    def gallery_names(self) -> set[str]:
        return {gallery.name for gallery in self.galleries()}

    def update_gallery(self, name: str, **settings: Any) -> GalleryOut:
        return self._send(GalleryOut, "PATCH", _path(name), json=settings)

    def hygiene(self, name: str, limit: int = 100) -> HygieneOut:
        """Who seems enrolled twice, filed wrongly, or easily taken for another."""
        return self._send(HygieneOut, "GET", f"{_path(name)}/hygiene", params={"limit": limit})

    def delete_gallery(self, name: str) -> DeletedOut:
        return self._send(DeletedOut, "DELETE", _path(name))

    def risk(self, gallery: str, *fpir: float) -> GalleryRiskOut:
        """Thresholds for these FPIRs (default: 0.1 to 0.0001), the curve between them, and the evidence."""
        return self._send(GalleryRiskOut, "GET", f"{_path(gallery)}/risk", params=_targets(fpir))

    def calibrate(self, gallery: str, *fpir: float) -> GalleryRiskOut:
        """As :meth:`risk`, from evidence that is derived anew first."""
        return self._send(GalleryRiskOut, "POST", f"{_path(gallery)}/calibrate", params=_targets(fpir))

    def audit(self, gallery: str | None = None, /, **chosen: str | None) -> Iterator[AuditLineOut]:
        """What was done, latest first; None: everywhere. ``chosen``: event, actor, since, until; subject, of a gallery;
        gallery's name, of one that was deleted."""
        cursor: str | None = None
        path = "/v1/audit" if gallery is None else f"{_path(gallery)}/audit"
        while True:
            given = {name: value for name, value in chosen.items() if value is not None}
            params = given | _cursor(cursor)
            page = self._send(AuditOut, "GET", path, params=params)
            yield from page.lines
            if (cursor := page.next) is None:
                return

    # Moving to another recogniser

    def migrate(self, gallery: str, to: str, on_sight: bool = False) -> MigrationOut:
        """Begin to move a gallery to another served pack (its name, or its recogniser's fingerprint), in its shadow."""
        return self._send(MigrationOut, "POST", _migrate(gallery), json={"to": to, "on_sight": on_sight})

    def migration(self, gallery: str) -> MigrationOut:
        """How far it is, and how the shadow would have answered."""
        return self._send(MigrationOut, "GET", _migrate(gallery))

    def cut_over(self, gallery: str, **options: Any) -> MigrationOut:
        """Let the new recogniser answer. ``options``: min_share=0.99, force, risk={"fpir": 0.001}."""
        return self._send(MigrationOut, "POST", f"{_migrate(gallery)}/cut-over", json=options)

    def roll_back(self, gallery: str) -> MigrationOut:
        """Let the recogniser before answer again."""
        return self._send(MigrationOut, "POST", f"{_migrate(gallery)}/roll-back")

    def finish_migration(self, gallery: str, force: bool = False) -> MigrationOut:
        """Keep only the vectors that answer now."""
        return self._send(MigrationOut, "POST", f"{_migrate(gallery)}/finish", json={"force": force})

    def import_gallery(
        self,
        gallery: str,
        file: Path | str,
        *,
        create: bool = False,
        recogniser: str | None = None,
        skip: int = 0,
        progress: Callable[[int], object] = lambda _: None,
    ) -> ImportOut:
        """Send a file (.ndjson, .ndjson.gz, .parquet); what is there already is passed over, so that a broken
        connection costs nothing but the sending. ``progress`` is told of bytes sent."""
        path = Path(file)
        headers = {"Content-Type": _media_type(path)} | ({"Content-Encoding": "gzip"} if path.suffix == ".gz" else {})
        params = {"create": create, "skip": skip} | ({} if recogniser is None else {"recogniser": recogniser})
        return self._send(
            ImportOut,
            "POST",
            f"{_path(gallery)}/import",
            params=params,
            headers=headers,
            content=_FilePieces(path, progress),
            timeout=httpx.Timeout(self._timeout_s, read=None, write=None),  # the answer comes after the work
        )

    def export_gallery(
        self,
        gallery: str,
        kind: Literal["ndjson", "parquet"] = "ndjson",
        *,
        embeddings: bool = True,
        crops: bool = False,
    ) -> Iterator[bytes]:
        """Pieces of a file of the gallery at one moment."""
        params: dict[str, Any] = {"format": kind, "embeddings": embeddings, "crops": crops}
        with self._http.stream("GET", f"{_path(gallery)}/export", params=params) as response:
            if not response.is_success:
                response.read()
                raise KithClientError(response.status_code, _problem(response))
            yield from response.iter_bytes()

    # Subjects

    def put_subject(
        self,
        gallery: str,
        subject: str,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
    ) -> SubjectOut:
        body = {"name": name, "metadata": dict(metadata or {}), "tags": list(tags)}
        return self._send(SubjectOut, "PUT", _path(gallery, subject), json=body)

    def update_subject(self, gallery: str, subject: str, **changes: Any) -> SubjectOut:
        """``changes``: name, metadata, tags; what is not named stays."""
        return self._send(SubjectOut, "PATCH", _path(gallery, subject), json=changes)

    def subject(self, gallery: str, subject: str) -> SubjectOut:
        return self._send(SubjectOut, "GET", _path(gallery, subject))

    def subjects(self, gallery: str, tags: Iterable[str] = ()) -> Iterator[SubjectOut]:
        cursor: str | None = None
        while True:
            params = {**_cursor(cursor), "tag": list(tags)}
            page = self._send(SubjectsOut, "GET", f"{_path(gallery)}/subjects", params=params)
            yield from page.subjects
            if (cursor := page.next) is None:
                return

    def delete_subject(self, gallery: str, subject: str) -> DeletedOut:
        return self._send(DeletedOut, "DELETE", _path(gallery, subject))

    def export_subject(self, gallery: str, subject: str) -> dict[str, Any]:
        """Everything that is held about one person."""
        return self._send(_AnyOut, "GET", f"{_path(gallery, subject)}/export").root

    def erasures(self, gallery: str, subject: str | None = None) -> Iterator[ReceiptOut]:
        """Receipts of what was erased, latest first; of one subject, if given."""
        cursor: str | None = None
        while True:
            chosen = {"subject": subject, "cursor": cursor}
            params = {name: value for name, value in chosen.items() if value is not None}
            page = self._send(ReceiptsOut, "GET", f"{_path(gallery)}/erasures", params=params)
            yield from page.receipts
            if (cursor := page.next) is None:
                return

    def verify_receipt(self, receipt: str) -> VerdictOut:
        return self._send(VerdictOut, "GET", f"/v1/erasures/{receipt}")

    def templates(self, gallery: str, subject: str) -> TemplatesOut:
        return self._send(TemplatesOut, "GET", f"{_path(gallery, subject)}/templates")

    def move_template(self, gallery: str, subject: str, template: str, to: str) -> TemplatesOut:
        """File a template under the subject ``to``, whose templates are returned."""
        path = f"{_path(gallery, subject)}/templates/{template}"
        return self._send(TemplatesOut, "PATCH", path, json={"subject": to})

    def delete_template(self, gallery: str, subject: str, template: str) -> DeletedOut:
        return self._send(DeletedOut, "DELETE", f"{_path(gallery, subject)}/templates/{template}")

    def enrol(
        self,
        gallery: str,
        subject: str,
        *photos: Photo,
        urls: Sequence[str] = (),
        embeddings: Sequence[Vector] = (),
        idempotency_key: str | None = None,
        **options: Any,
    ) -> EnrolOut:
        """``options``: face="largest", allow_duplicate, allow_inconsistent, allow_low_quality; with ``embeddings``,
        recogniser=... (whose they are, as :meth:`embed` says). The answer to several photos says for each what became
        of it; a lone one refused raises."""
        path = f"{_path(gallery, subject)}/templates"
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if embeddings:
            options["embeddings"] = [_floats(vector) for vector in embeddings]
        return self._send(EnrolOut, "POST", path, **_photos(photos, urls, options, headers))

    def enrol_archive(self, gallery: str, archive: Path | str | Archive, **options: Any) -> JobOut:
        """Send a zip, tar, tar.gz or tar.zst of PERSON/PHOTO; the answer is the job that enrols it: see ``wait_for``.

        ``options``: as of ``enrol``, and strip=N (folders above the people's)."""
        body = FileStream(Path(archive)) if isinstance(archive, Path | str) else archive
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.size)}
        params = {name: value for name, value in options.items() if value is not None}
        path = f"{_path(gallery)}/enrolments"
        return self._send(JobOut, "POST", path, content=body, headers=headers, params=params)

    def identify(
        self,
        gallery: str,
        *photos: Photo,
        urls: Sequence[str] = (),
        embeddings: Sequence[Vector] = (),
        **options: Any,
    ) -> IdentifyOut:
        """``options``: risk={"fpir": 0.001}, faces="largest", top_k, filter={"tags": [...]}, check_quality."""
        path = f"{_path(gallery)}/identify"
        if embeddings:
            options["embeddings"] = [_floats(vector) for vector in embeddings]
        return self._send(IdentifyOut, "POST", path, **_photos(photos, urls, options))

    # Jobs

    def job(self, job: str) -> JobOut:
        return self._send(JobOut, "GET", f"/v1/jobs/{job}")

    def jobs(self, gallery: str | None = None, states: Iterable[str] = ()) -> Iterator[JobOut]:
        """The latest first; of one gallery, in some states (queued, running, succeeded, failed, cancelled)."""
        chosen: dict[str, Any] = {"state": list(states)} | ({} if gallery is None else {"gallery": gallery})
        cursor: str | None = None
        while True:
            params = {**chosen, **_cursor(cursor)}
            page = self._send(JobsOut, "GET", "/v1/jobs", params=params)
            yield from page.jobs
            if (cursor := page.next) is None:
                return

    def job_items(self, job: str, failed: bool = False) -> Iterator[JobItemOut]:
        """What became of each item so far; only those with a problem, if ``failed``."""
        cursor: str | None = None
        while True:
            params = {"failed": failed, "limit": 1000, **_cursor(cursor)}
            page = self._send(JobItemsOut, "GET", f"/v1/jobs/{job}/items", params=params)
            yield from page.items
            if (cursor := page.next) is None:
                return

    def cancel_job(self, job: str) -> JobOut:
        """One that runs ends between two items: see ``wait_for``."""
        return self._send(JobOut, "DELETE", f"/v1/jobs/{job}")

    def wait_for(
        self, job: str, timeout_s: float | None = None, seen: Callable[[JobOut], None] = lambda job: None
    ) -> JobOut:
        """Ask until the job is finished, each answer shown to ``seen``. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.05
        while True:
            found = self.job(job)
            seen(found)
            if found.state not in ("queued", "running"):
                return found
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {found.state} after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(1.0, pause_s * 1.5)

    # API keys

    def create_key(self, name: str, scopes: Iterable[Scope], **options: Any) -> NewKeyOut:
        """``options``: galleries=[...] (default: all), expires_at, rate, burst. The answer's ``token`` is told once."""
        body = KeyIn(name=name, scopes=list(scopes), **options).model_dump(mode="json")
        return self._send(NewKeyOut, "POST", "/v1/keys", again=False, json=body)

    def api_keys(self, ended: bool = False) -> list[KeyOut]:
        """``ended``: also those that were revoked or have expired."""
        return self._send(KeysOut, "GET", "/v1/keys", params={"ended": ended}).keys

    def revoke_key(self, key: str) -> KeyOut:
        return self._send(KeyOut, "DELETE", f"/v1/keys/{quote(key, safe='')}")

    def rotate_key(self, key: str, overlap_s: int = DAY_S) -> NewKeyOut:
        """Another key in the place of one, which works on for ``overlap_s``."""
        path = f"/v1/keys/{quote(key, safe='')}/rotate"
        return self._send(NewKeyOut, "POST", path, again=False, json={"overlap_s": overlap_s})

    # Service

    def model(self) -> ModelsOut:
        """The pack of KITH_PACK, and beside it all that are served."""
        return self._send(ModelsOut, "GET", "/v1/models")

    def ready(self) -> HealthOut:
        return self._send(HealthOut, "GET", "/readyz")

    def _send(self, model: type[Answer], method: str, path: str, again: bool = True, **arguments: Any) -> Answer:
        """``again``: also where the connection broke, so that it may have been done already."""
        for attempt in range(self._attempts):
            last = attempt == self._attempts - 1
            try:
                response = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if last or not again:
                    raise KithUnreachableError(str(self._http.base_url), error) from error
            else:
                if response.is_success:
                    return model.model_validate_json(response.content)
                if last or response.status_code not in RETRIED:
                    raise KithClientError(response.status_code, _problem(response))
            time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")


class _AnyOut(RootModel[dict[str, Any]]):
    """A document whose parts are listed elsewhere."""


class _FilePieces:
    """Can be sent again."""

    def __init__(self, path: Path, progress: Callable[[int], object]) -> None:
        self._path = path
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
                self._progress(len(piece))


def _media_type(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return "application/vnd.apache.parquet" if name.endswith(".parquet") else "application/x-ndjson"


def _problem(response: httpx.Response) -> Mapping[str, Any]:
    try:
        document = response.json()
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {"detail": f"HTTP {response.status_code}"}


def _path(gallery: str, subject: str | None = None) -> str:
    base = f"/v1/galleries/{quote(gallery, safe='')}"
    return base if subject is None else f"{base}/subjects/{quote(subject, safe='')}"


def _migrate(gallery: str) -> str:
    return f"{_path(gallery)}/migrate"


def _targets(fpir: tuple[float, ...]) -> dict[str, list[float]]:
    return {"fpir": list(fpir)} if fpir else {}


def _cursor(cursor: str | None) -> dict[str, Any]:
    return {} if cursor is None else {"cursor": cursor}


def _read(photo: Photo) -> bytes:
    return photo if isinstance(photo, bytes) else Path(photo).read_bytes()


def _photos(
    photos: Sequence[Photo],
    urls: Sequence[str],
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A request's photos and options: one photo as it is, which costs the server least, several as a form."""
    options = {**(options or {}), **({"urls": list(urls)} if urls else {})}
    if not photos:
        return {"json": options, "headers": headers}
    asked = {"request": json.dumps(options)} if options else {}
    if len(photos) == 1 and BESIDE_A_PHOTO.issuperset(options):
        headers = {**(headers or {}), "Content-Type": "application/octet-stream"}
        return {"content": _read(photos[0]), "params": asked, "headers": headers}
    files = [("images", ("photo", _read(photo))) for photo in photos]
    return {"files": files, "data": asked, "headers": headers}


def _floats(vector: Vector) -> list[float]:
    return [float(v) for v in np.asarray(vector, np.float64).ravel()]
