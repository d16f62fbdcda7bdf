"""Whole galleries in and out, as files that stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.context import Context, Kith
from service.api.galleries import GalleryPath
from service.api.openapi import PROBLEMS
from service.api.permissions import Permitted
from service.api.problems import problem
from service.api.schemas import GalleryOut, GallerySettingsIn, ImportOut, ImportRefusalOut
from service.errors import (
    GalleryExistsError,
    GalleryNotFoundError,
    ImportFileError,
    KithError,
    RequestTooLargeError,
    StorageError,
    UnsupportedMediaTypeError,
)
from service.gallery.audit_log import Entry
from service.gallery.importing import Export, Format, Import, Report, check_header, export
from service.gallery.ndjson import Lines
from service.gallery.subjects import Gallery, GallerySettings
from service.gallery.transfer import Header, Items, max_items
from service.gunzip import Gunzip

router = APIRouter(route_class=Permitted, prefix="/v1/galleries/{gallery}", tags=["transfer"], responses=PROBLEMS)
MEDIA_TYPES: Final[dict[str, Format]] = {
    "application/x-ndjson": "ndjson",
    "application/vnd.apache.parquet": "parquet",
}
PIECE_BYTES: Final = 8_000_000
"""Of a body, what is read before it is worked on."""
SETTINGS: Final = frozenset(GallerySettingsIn.model_fields)
BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
FILE: Final = {"requestBody": {"required": True, "content": dict.fromkeys(MEDIA_TYPES, BINARY)}}
FORMATS: Final[dict[int | str, dict[str, Any]]] = {200: {"content": dict.fromkeys(MEDIA_TYPES, BINARY)}}


@router.post("/import", openapi_extra=FILE)
async def import_gallery(
    gallery: GalleryPath,
    request: Request,
    kith: Kith,
    create: Annotated[bool, Query(description="Make the gallery if there is none, with the file's settings.")] = False,
    recogniser: Annotated[
        str | None, Query(pattern="^[0-9a-f]{1,64}$", description="Whose vectors a file without a header holds.")
    ] = None,
    skip: Annotated[int, Query(ge=0, description="Pass over lines (Parquet: rows) up to this number.")] = 0,
) -> ImportOut:
    """Take a file's subjects and templates: NDJSON, `Content-Encoding: gzip` or none, or Parquet.

    Blocks of thousands are on disk as they are read; a file sent again is passed over as far as it is there. An item
    that cannot be taken is refused alone. Faces are not examined: duplicates and odd ones are what GET hygiene finds.
    """
    kind = _kind(request)
    intake = _Intake(kith, gallery, create, recogniser, skip, await _begun(kith, gallery))
    try:
        if kind == "ndjson":
            await _take_lines(kith, request, intake)
        else:
            await _take_parquet(kith, request, intake)
        assert intake.taking is not None  # noqa: S101 - every file has a header or is refused
        intake.taking.end()
    except KithError as error:
        if intake.taking is not None:
            error.extra["report"] = _out(gallery, intake.taking.report).model_dump(mode="json")
        raise
    finally:
        if intake.gallery is not None:
            kith.pipeline.risks.follow(intake.gallery)
    return _out(gallery, intake.taking.report)


async def _begun(kith: Context, gallery: str) -> Gallery | None:
    """As the request begins, before its body is read: who is erased from then on stays so, and so does a gallery."""
    try:
        return await kith.gallery(gallery)
    except GalleryNotFoundError:
        return None


class _Intake:
    """Opens the gallery as soon as the file has said what it holds."""

    def __init__(
        self, kith: Context, name: str, create: bool, recogniser: str | None, skip: int, begun: Gallery | None
    ) -> None:
        self._kith = kith
        self._name = name
        self._create = create and begun is None
        self._recogniser = recogniser
        self._skip = skip
        self._begun = begun
        self.gallery: Gallery | None = None
        self.taking: Import | None = None

    def default_header(self) -> Header | None:
        """Of a file without one. Raises GalleryNotFoundError."""
        if self._recogniser is None:
            return None
        try:
            dimension = self._kith.store.gallery(self._name).dimension
        except GalleryNotFoundError:
            if not self._create:
                raise
            served = self._kith.recognisers.get(self._recogniser) or self._kith.recognisers.default
            dimension = served.dimension
        return Header(self._recogniser, dimension)

    def open(self, header: Header) -> Import:
        if self.taking is None:
            self.gallery = self._since_it_began(self._gallery(header))
            opened = Import(self._kith.transfers.bulk, self.gallery, self._skip)
            opened.accept(header)
            self.taking = opened
        return self.taking

    def _gallery(self, header: Header) -> Gallery:
        try:
            return self._kith.store.gallery(self._name)
        except GalleryNotFoundError:
            if not self._create:
                raise
        try:
            given = {key: value for key, value in header.settings.items() if key in SETTINGS}
            settings = GallerySettingsIn.model_validate(given).over(GallerySettings())
        except ValueError as error:
            raise ImportFileError("the settings in the file's header are none of a gallery") from error
        recogniser = self._kith.recognisers.get(header.recogniser) or self._kith.recognisers.default
        try:
            # Of a served recogniser: a file of another one is refused, and must not leave a gallery behind.
            check_header(header, self._name, recogniser.fingerprint, recogniser.dimension)
            return self._kith.store.create_gallery(self._name, recogniser.fingerprint, recogniser.dimension, settings)
        except GalleryExistsError:  # since a moment ago
            return self._kith.store.gallery(self._name)

    def _since_it_began(self, now: Gallery) -> Gallery:
        """Raises GalleryNotFoundError: it is another one of its name."""
        if self._begun is None:
            return replace(now, erased=0)
        if now.pk != self._begun.pk:
            raise GalleryNotFoundError(f"gallery {self._name!r} was deleted meanwhile")
        return replace(now, erased=self._begun.erased)

    def take(self, lines: Lines, blocks: Iterator[Items]) -> None:
        for items in blocks:
            assert lines.header is not None  # noqa: S101 - it comes before the first block
            self.open(lines.header).take(items)
        if lines.header is not None:
            self.open(lines.header)


async def _take_lines(kith: Context, request: Request, intake: _Intake) -> None:
    run = kith.transfers.importing
    lines = Lines(await run(intake.default_header))
    unpacker, count = _unpacker(request), 0
    async for piece in _pieces(kith, request, unpacker):
        count += piece.count(b"\n")
        if count > max_items(unpacker.packed):
            raise ImportFileError(f"the file has more than {max_items(unpacker.packed)} lines for its size")
        await run(intake.take, lines, lines.feed(piece))
    await run(intake.take, lines, lines.end())


async def _take_parquet(kith: Context, request: Request, intake: _Intake) -> None:
    """Its table of contents stands at its end: it is kept in a file until it is complete."""

    def take() -> None:
        from service.gallery.parquet import Reader  # 30 MB of pyarrow, for those who use it

        with _keeping():
            whole = kept.reader()
        reader = Reader(whole, intake.default_header())
        intake.open(reader.header).take_all(reader)

    def keep(piece: bytes) -> None:
        with _keeping():
            kith.spool.write(kept, piece)

    with closing(await kith.run(kith.spool.temporary)) as kept:
        async for piece in _pieces(kith, request, _unpacker(request)):
            await kith.run(keep, piece)
        await kith.transfers.importing(take)


@contextmanager
def _keeping() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the file cannot be kept until it is read: {error.strerror}") from error


async def _pieces(kith: Context, request: Request, unpacker: _Plain | Gunzip) -> AsyncIterator[bytes]:
    """Unpack the body, in pieces of about PIECE_BYTES. Raises ImportFileError, RequestTooLargeError."""
    most = kith.settings.max_import_bytes
    waiting: list[bytes] = []
    size = 0
    try:
        async for packed in request.stream():
            for piece in unpacker.feed(packed):
                waiting.append(piece)
                size += len(piece)
                if size >= PIECE_BYTES:
                    yield b"".join(waiting)
                    waiting, size = [], 0
                if unpacker.unpacked > most:
                    raise RequestTooLargeError(f"the file has more than {most} bytes when unpacked")
        yield b"".join(waiting)
        unpacker.end()
    except ClientDisconnect as error:
        raise ImportFileError("the connection ended before the file did") from error
    except ValueError as error:
        raise ImportFileError(str(error)) from error


def _unpacker(request: Request) -> _Plain | Gunzip:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip"):
        raise UnsupportedMediaTypeError(f"content encoding {coding!r}")
    return Gunzip() if coding == "gzip" else _Plain()


class _Plain:
    """A body that is not packed, with the attributes of Gunzip."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self.packed += len(piece)
        self.unpacked += len(piece)
        yield piece

    def end(self) -> None:
        pass


def _kind(request: Request) -> Format:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in MEDIA_TYPES:
        raise UnsupportedMediaTypeError(
            f"content type {given or 'none'!r}; an import is one of {', '.join(MEDIA_TYPES)}"
        )
    return MEDIA_TYPES[given]


@router.get("/export", response_class=StreamingResponse, responses=FORMATS)
async def export_gallery(
    gallery: GalleryPath,
    kith: Kith,
    format: Format = "ndjson",  # noqa: A002 - the name that callers see
    embeddings: Annotated[bool, Query(description="False: subjects and metadata alone, not to be imported.")] = True,
    crops: Annotated[bool, Query(description="With the faces that the gallery keeps.")] = False,
) -> StreamingResponse:
    """The gallery at one moment, whatever is written meanwhile: subjects, metadata, templates, embeddings."""
    await kith.transfers.begin_export()
    pieces = Export(export(kith.transfers.bulk, gallery, format, settings_of, embeddings, crops))
    try:
        first = await kith.transfers.exporting(pieces.next)  # what is wrong shows before anything is answered
        await kith.audit.write(_exported(await kith.gallery(gallery), format, embeddings, crops))
    except BaseException:
        kith.transfers.end_export(pieces.close)
        raise
    return _Exported(
        kith,
        first,
        pieces,
        media_type=next(name for name, kind in MEDIA_TYPES.items() if kind == format),
        headers={"Content-Disposition": f'attachment; filename="{gallery}.{format}"'},
    )


def _exported(gallery: Gallery, kind: Format, embeddings: bool, crops: bool) -> Entry:
    details = {"format": kind, "embeddings": embeddings, "crops": crops, "subjects": gallery.subjects}
    return Entry("gallery_exported", (gallery.pk, gallery.name), details=details)


class _Exported(StreamingResponse):
    """Ends the export with the answer, even if none of it could be sent."""

    def __init__(self, kith: Context, first: bytes | None, pieces: Export, **about: Any) -> None:
        super().__init__(_streamed(kith, first, pieces), **about)
        self._end = partial(kith.transfers.end_export, pieces.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _streamed(kith: Context, first: bytes | None, pieces: Export) -> AsyncIterator[bytes]:
    piece = first
    while piece is not None:
        yield piece
        piece = await kith.transfers.exporting(pieces.next)


def settings_of(gallery: Gallery) -> dict[str, Any]:
    return GalleryOut.of(gallery).model_dump(mode="json", include=set(SETTINGS), exclude_none=True)


def _out(gallery: str, report: Report) -> ImportOut:
    return ImportOut(
        gallery=gallery,
        items=report.items,
        subjects=report.subjects,
        templates=report.templates,
        present=report.present,
        refused=report.refused,
        refusals=[ImportRefusalOut(item=r.number, error=problem(r.error)) for r in report.refusals],
    )
