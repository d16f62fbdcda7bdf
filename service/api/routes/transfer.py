"""Streaming import and export of whole galleries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Query, Request
from starlette.responses import StreamingResponse

from kith.wire.galleries import GallerySettingsIn
from kith.wire.transfer import FileFingerprint, GalleryFileHeader, ImportOut
from service.api.http.access import ADMIN, BackendDep, EndingResponse, router
from service.api.http.bodies import media_type, set_body_limit, unsupported
from service.api.http.openapi import BINARY
from service.api.http.parameters import GalleryPath
from service.api.routes.galleries import change_settings, to_gallery_out
from service.core.errors import GalleryNotFoundError, InvalidDataError, KithError, LimitReachedError
from service.core.unpacking import Unpacker
from service.domain.gallery import Gallery, GallerySettings
from service.domain.gallery_items import FileRow, max_items
from service.storage.audit.log import Entry
from service.storage.transfer.importing import Export, Import, check_header, export
from service.storage.transfer.ndjson import Lines
from service.usecases.backend import Backend, as_of

routes = router("/v1/galleries/{gallery}", "transfer")
NDJSON: Final = "application/x-ndjson"
BLOCK_BYTES: Final = 8_000_000
"""Bytes of a body that are read before they are processed."""
SETTING_NAMES: Final = frozenset(GallerySettingsIn.model_fields)
REQUEST_BODY: Final = {"requestBody": {"required": True, "content": {NDJSON: BINARY}}}
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {NDJSON: BINARY}}}


@routes.post("/import", dependencies=[ADMIN], openapi_extra=REQUEST_BODY)
async def import_gallery(
    gallery: GalleryPath,
    request: Request,
    backend: BackendDep,
    create: Annotated[
        bool, Query(description="Create the gallery if it does not exist, with the settings in the file.")
    ] = False,
    recognizer: Annotated[
        FileFingerprint | None,
        Query(description="Fingerprint of the recognizer, for a file without a header."),
    ] = None,
) -> ImportOut:
    """Import subjects and templates from NDJSON, with or without `Content-Encoding: gzip`.

    Items are committed in blocks of thousands, and present items are skipped, so that a file can be sent again. An
    invalid item is rejected alone. Identities are not checked: GET hygiene finds duplicates and mislabeled templates.
    """
    coding = set_body_limit(request, backend.settings.max_upload_bytes, streamed=True, codings=("gzip",))
    if (given := media_type(request)) != NDJSON:
        raise unsupported(given, f"; send {NDJSON}")
    snapshot = None
    with suppress(GalleryNotFoundError):
        snapshot = await backend.find_gallery(gallery)
    intake = _Intake(backend, gallery, create and snapshot is None, recognizer, snapshot)
    try:
        await _import_lines(backend, request, Unpacker("gzip") if coding else None, intake)
        assert intake.opened is not None  # noqa: S101 - a file without header raises
        intake.opened.end()
    except KithError as error:
        if intake.opened is not None:
            error.extra["report"] = intake.opened.report.model_dump(mode="json")
        raise
    finally:
        if intake.gallery is not None:
            backend.risks.derive_later(intake.gallery)
    return intake.opened.report


@dataclass
class _Intake:
    """Import that opens or creates its gallery once the file's header is read.

    ``snapshot``: the gallery before the body: what is erased during the request must stay erased.
    """

    backend: Backend
    name: str
    create: bool
    recognizer: str | None
    snapshot: Gallery | None
    gallery: Gallery | None = None
    opened: Import | None = None

    def default_header(self) -> GalleryFileHeader | None:
        """Return the header for a file without one. Raises GalleryNotFoundError."""
        if self.recognizer is None:
            return None
        try:
            dimension = self.backend.store.galleries.get(self.name).dimension
        except GalleryNotFoundError:
            if not self.create:
                raise
            served = self.backend.recognizers.get(self.recognizer) or self.backend.recognizers.default
            dimension = served.dimension
        return GalleryFileHeader(self.recognizer, dimension)

    def open(self, header: GalleryFileHeader) -> Import:
        if self.opened is None:
            current, snapshot = self._find_or_create(header), self.snapshot
            self.gallery = replace(current, erased=0) if snapshot is None else as_of(snapshot, current)
            self.opened = Import(self.backend.transfers.bulk, self.gallery, header)
        return self.opened

    def _find_or_create(self, header: GalleryFileHeader) -> Gallery:
        try:
            return self.backend.store.galleries.get(self.name)
        except GalleryNotFoundError:
            if not self.create:
                raise
        try:
            given = {key: value for key, value in header.settings.items() if key in SETTING_NAMES}
            settings = change_settings(GallerySettingsIn.model_validate(given), GallerySettings())
        except ValueError as error:
            raise InvalidDataError("import", "the file's header has invalid gallery settings") from error
        recognizer = self.backend.recognizers.get(header.recognizer) or self.backend.recognizers.default
        # Raise before creating: a file of another recognizer must not leave an empty gallery behind.
        check_header(header, self.name, recognizer.fingerprint, recognizer.dimension)
        return self.backend.store.galleries.create(self.name, recognizer.fingerprint, recognizer.dimension, settings)

    def add(self, lines: Lines, blocks: Iterator[list[FileRow]]) -> None:
        for rows in blocks:
            assert lines.header is not None  # noqa: S101 - Lines reads it before the first block
            self.open(lines.header).take(rows)
        if lines.header is not None:
            self.open(lines.header)


async def _import_lines(backend: Backend, request: Request, unpacker: Unpacker | None, intake: _Intake) -> None:
    run = backend.transfers.importing.run
    lines = Lines(await run(intake.default_header))
    count = 0
    async for piece, packed_bytes in _read_blocks(backend, request, unpacker):
        count += piece.count(b"\n")
        if count > max_items(packed_bytes):
            raise InvalidDataError("import", f"the file has more than {max_items(packed_bytes)} lines for its size")
        await run(intake.add, lines, lines.feed(piece))
    await run(intake.add, lines, lines.end())


async def _read_blocks(
    backend: Backend, request: Request, unpacker: Unpacker | None
) -> AsyncIterator[tuple[bytes, int]]:
    """Decompress the body in blocks of about BLOCK_BYTES, each with the size of the body until then.

    Raises import_invalid, request_too_large.
    """
    max_bytes = backend.settings.max_unpacked_bytes
    block = bytearray()
    packed_bytes = unpacked_bytes = 0
    try:
        async for packed in request.stream():
            packed_bytes += len(packed)
            for piece in [packed] if unpacker is None else unpacker.feed(packed):
                block += piece
                unpacked_bytes += len(piece)
                if unpacked_bytes > max_bytes:
                    raise LimitReachedError(
                        "request_too_large", f"the file has more than {max_bytes} bytes when decompressed"
                    )
                if len(block) >= BLOCK_BYTES:
                    yield bytes(block), packed_bytes
                    block.clear()
        yield bytes(block), packed_bytes
        if unpacker is not None:
            unpacker.end()
    except ValueError as error:
        raise InvalidDataError("import", str(error)) from error


@routes.get("/export", dependencies=[ADMIN], response_class=StreamingResponse, responses=RESPONSES)
async def export_gallery(
    gallery: GalleryPath,
    backend: BackendDep,
    embeddings: Annotated[
        bool, Query(description="False: only subjects and metadata. Such a file cannot be imported.")
    ] = True,
    crops: Annotated[bool, Query(description="Include the stored face crops.")] = False,
) -> StreamingResponse:
    """Export a snapshot of the gallery: subjects, metadata, templates and embeddings."""
    await backend.transfers.begin_export()
    pieces = Export(export(backend.transfers.bulk, gallery, _settings_document, embeddings, crops))
    end = partial(backend.transfers.end_export, pieces.close)
    try:
        first = await backend.transfers.exporting.run(pieces.next)  # errors are raised before the response begins
        await backend.audit.write(_export_entry(await backend.find_gallery(gallery), embeddings, crops))
    except BaseException:
        end()
        raise
    headers = {"Content-Disposition": f'attachment; filename="{gallery}.ndjson"'}
    return EndingResponse(_stream(backend, first, pieces), end, media_type=NDJSON, headers=headers)


def _export_entry(gallery: Gallery, embeddings: bool, crops: bool) -> Entry:
    details = {"embeddings": embeddings, "crops": crops, "subjects": gallery.subjects}
    return Entry("gallery_exported", (gallery.pk, gallery.name), details=details)


async def _stream(backend: Backend, first: bytes | None, pieces: Export) -> AsyncIterator[bytes]:
    piece = first
    while piece is not None:
        yield piece
        piece = await backend.transfers.exporting.run(pieces.next)


def _settings_document(gallery: Gallery) -> dict[str, Any]:
    return to_gallery_out(gallery).model_dump(mode="json", include=set(SETTING_NAMES), exclude_none=True)
