"""Fuzz targets: functions of untrusted bytes. Any undocumented exception is a finding."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.requests import Request

from kith.wire.identification import IdentifyIn
from kith.wire.subjects import EnrollIn
from kith.wire.transfer import GalleryFileHeader
from kith.wire.verification import VerifyIn
from models.errors import ModelError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.calibration import EDGES, Calibration
from service.api.http.bodies import read_photos
from service.core.errors import ImageError, KithError
from service.core.unpacking import ZstdFile
from service.domain.gallery import Gallery, GallerySettings
from service.domain.gallery_items import FileRow, checked, vector_bytes
from service.inference.archives import ArchiveLimits, iterate_members, read_contents
from service.inference.images import ImageLimits
from service.security.sealing import Seal
from service.settings import Settings
from service.storage.transfer.ndjson import Lines, header_line, lines_of
from tests.service.inference.image_files import (
    FORMATS,
    SMALL,
    encode,
    heic,
    heic_grid,
    ifd,
    read_header,
    scans,
    with_exif,
)

DIMENSION: Final = 4
HEADER: Final = GalleryFileHeader("ab" * 16, DIMENSION, "g", {"index": "best"}, subject_count=2, template_count=2)


@dataclass(frozen=True)
class Target:
    """Fuzz target. ``seeds``: valid example inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def _decode(data: bytes) -> None:
    try:
        picture = read_header(data, ImageLimits(200_000, 200_000)).decode(0.3).at_least(1.0)
    except ImageError:
        return
    assert picture.pixels.shape == (picture.height, picture.width, 3)


def _photos() -> Iterator[bytes]:
    small = SMALL.resize((24, 16))
    for kind in FORMATS:
        yield encode(small, kind)
    yield heic(small)
    yield heic(small.convert("LA"), exif=b"Exif\0\0" + ifd((0x112, 3, 1, 6)))
    yield heic_grid(0, 1, 128, 64)
    yield encode(small, "JPEG", progressive=True)
    yield encode(small.convert("CMYK"), "JPEG")
    yield encode(small.convert("P"), "PNG", transparency=3)
    yield encode(small.convert("LA"), "PNG")
    yield encode(small, "TIFF", compression="tiff_lzw")
    yield encode(small, "MPO", save_all=True, append_images=[small])
    yield from (scans(16, 16, 3), with_exif(ifd((0x112, 3, 1, 6))))


def _manifest(data: bytes) -> None:
    """Load a pack with this manifest and, after a NUL, this calibration. Its networks are not opened."""
    manifest, _, calibration = data.partition(b"\0")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("detector.onnx", "recognizer.onnx"):
            (root / name).touch()
        (root / "manifest.json").write_bytes(manifest)
        (root / "calibration.json").write_bytes(calibration)
        try:
            pack = load_pack(root)
            if pack.calibration is not None:
                Calibration.from_document(pack.calibration)
        except ModelError:
            pass


def _manifests() -> Iterator[bytes]:
    document = json.loads((BUNDLED_PACK / "manifest.json").read_text())
    for task, name in (("detection", "detector.onnx"), ("recognition", "recognizer.onnx")):
        document["tasks"][task]["file"] = name
    document |= {"calibration": "calibration.json", "metrics": {}, "provenance": {}}
    document["tasks"]["recognition"]["alignment"] = {"template": [[38, 51], [73, 51], [56, 71], [41, 92], [70, 92]]}
    counts = [1] * (len(EDGES) - 1)
    tail = {"start": 0.3, "share": 0.001, "shape": -0.1, "scale": 0.05}
    calibration = {"histograms": {"impostor": counts, "genuine": counts}, "tail": tail, "variances": [[0, 1], [0.1, 1]]}
    yield json.dumps(document).encode() + b"\0" + json.dumps(calibration).encode()


def _lines(data: bytes) -> None:
    """Parse the bytes in two pieces. The first byte gives the position of the cut."""
    cut = data[0] if data else 0
    lines = Lines()
    try:
        for block in (*lines.feed(data[1 : cut + 1]), *lines.feed(data[cut + 1 :]), *lines.end()):
            assert lines.header is not None
            _check(block, lines.header.dimension)
    except KithError:
        pass


def _check(block: list[FileRow], dimension: int) -> None:
    gallery = Gallery(1, "g", HEADER.recognizer, dimension, GallerySettings(), datetime.now(UTC), Seal(bytes(32)))
    taken, refused = checked(block, gallery)
    assert len(taken) + len(refused) == len(block)
    vectors = [item.template.vector for item in taken if item.template is not None]
    assert np.allclose([np.linalg.norm(vector) for vector in vectors], 1, atol=1e-5)


def _items() -> list[dict[str, Any]]:
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    vectors = np.eye(2, DIMENSION, dtype=np.float32)
    ada = {"subject": "ada", "name": "Ada", "metadata": {"k": [1, "x"]}, "tags": ["staff"], "subject_created_at": at}
    ada |= {"template": "0" * 32, "kind": "photo", "quality": {"score": 0.5}, "detection_score": 0.9, "created_at": at}
    ada |= {"embedding": vector_bytes(vectors[0]), "crop": b"RIFF\0\0\0\0WEBP", "landmarks": [[1, 2]] * 5}
    return [ada, {"subject": "grace", "embedding": vectors[1].tolist()}]


def _ndjsons() -> Iterator[bytes]:
    yield b"\xff" + header_line(HEADER) + lines_of(_items())


def _archive(data: bytes) -> None:
    limits = ArchiveLimits(100, 10_000, 100_000)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            read_contents(Path(file.name), limits, None, lambda: None)
            for member in iterate_members(Path(file.name), limits):
                assert len(member.name) <= 512
                with suppress(KithError):
                    assert len(member.read()) <= limits.photo_bytes
        except KithError:
            pass


def _archives() -> Iterator[bytes]:
    files = {"p/ada/1.jpg": b"photo" * 40, "p/grace/2.png": b"other", "p/manifest.csv": b"file,subject\nada/1.jpg,a\n"}
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as archive:
            for name, payload in files.items():
                archive.writestr(name, payload)
        yield buffer.getvalue()
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive_:
            for name, payload in files.items():
                info = tarfile.TarInfo(name if form != tarfile.PAX_FORMAT else name.replace("ada", "ä" * 120))
                info.size = len(payload)
                archive_.addfile(info, io.BytesIO(payload))
            link = tarfile.TarInfo("p/ada/link.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive_.addfile(link)
        yield buffer.getvalue()
    yield gzip.compress(buffer.getvalue(), mtime=0)
    packed = io.BytesIO()
    with ZstdFile(packed, "w") as stream:
        stream.write(buffer.getvalue())
    yield packed.getvalue()


LOOP: Final = asyncio.new_event_loop()
SETTINGS: Final = Settings(max_image_bytes=1000, max_images=2)
KINDS: Final = (
    "application/json",
    "multipart/form-data; boundary=b",
    "image/jpeg",
    "multipart/form-data; boundary=" + "b" * 70,
)


def _body(data: bytes) -> None:
    """Parse a request body. The first byte selects kind and format, the second the position of the cut."""
    kind, cut = (*data[:2], 0, 0)[:2]
    whole = data[2:]
    pieces = [whole[: cut * 4], whole[cut * 4 :]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0) if pieces else b"", "more_body": bool(pieces)}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": whole[:cut] if kind % 4 == 2 else b""}
    request = Request(scope | {"headers": [(b"content-type", KINDS[kind % 4].encode())]}, receive)
    model: Any = (IdentifyIn, EnrollIn, VerifyIn)[kind // 4 % 3]
    with suppress(KithError):
        LOOP.run_until_complete(read_photos(request, model, SETTINGS))


def _bodies() -> Iterator[bytes]:
    probe = b'{"images": ["/9j/"], "embeddings": [[0.5, -1e3]], "risk": {"fpir": 0.01}, "filter": {"tags": ["x"]}}'
    enroll = b'{"images": ["/9j/"], "face": "largest", "allow_duplicate": true}'
    sides = (
        b'{"a": {"image": "/9j/"}, "b": {"subject": {"gallery": "g", "subject": "s"}}, "risk": {"preset": "strict"}}'
    )
    yield from (b"\x00\x05" + probe, b"\x04\x05" + enroll, b"\x08\x05" + sides)
    part = b'--b\r\nContent-Disposition: form-data; name="%s"; filename="p"\r\n\r\nphoto\r\n'
    options = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"top_k": 3}\r\n--b--\r\n'
    yield b"\x01\x09" + part % b"images" + options
    yield b"\x09\x09" + part % b"a" + part % b"b" + b"--b--\r\n"
    yield b"\x02\x11" + b"request=%7B%7D&xx" + b"photo"


def _any(data: bytes) -> None:
    """Run the target that the first byte selects."""
    if data:
        [*TARGETS.values()][data[0] % (len(TARGETS) - 1)].run(data[1:])


def _each() -> Iterator[bytes]:
    for place, target in enumerate([*TARGETS.values()][:-1]):
        for seed in target.seeds():
            yield bytes([place]) + seed


TARGETS: Final = {
    "decode": Target(_decode, _photos),
    "manifest": Target(_manifest, _manifests),
    "ndjson": Target(_lines, _ndjsons),
    "archive": Target(_archive, _archives),
    "body": Target(_body, _bodies),
    "all": Target(_any, _each),
}
