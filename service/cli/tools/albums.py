"""Albums: the unlabeled photos of a folder, embedded once and grouped into people.

The folder of an album holds ``faces.sqlite``, the faces of each photo by its content, and ``groups.json``. Only the
owner may read them. All photos are grouped in each run, in the order of their content. So the groups depend on the
photos only, and not on earlier runs or on names of files.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.checksums import sha256_of
from models.errors import PackError
from models.pack.manifest import ModelPack
from models.risk.albums import MIN_FACES, keep_ids
from models.risk.calibration import Calibration
from models.runtime.network import Float
from models.vision.face_search import Detail
from models.vision.photo_files import PhotoFolder
from models.vision.quality_gate import QualityGate
from service.cli.tools.album_names import GROUPS, VERSION, AlbumError, face_name, read_groups
from service.core.atomic_files import atomic_write
from service.core.errors import KithError
from service.core.photo_errors import ImageTooLargeError
from service.inference.photo_pipeline import Photo
from service.inference.recognizers import read_packs
from service.risk.albums import group_faces_of_album
from service.settings import Settings
from service.wiring import open_faces

FACES: Final = "faces.sqlite"
MAX_FACES: Final = 200_000
"""Faces of one album: half an hour of two cores, and 2 GB."""
MAX_IN_FLIGHT: Final = 16
"""Photos that are embedded at once: two full detector batches."""
UNREADABLE: Final = "unreadable"


@dataclass(frozen=True, eq=False)
class StoredFace:
    """Face of a photo. ``name``: from the photo's content and the face's number, so the same in each run."""

    name: str
    box: list[float]
    reasons: list[str]
    vector: Float


@dataclass(frozen=True)
class Refused:
    """Photo that has no faces in the album, and why."""

    photo: str
    code: str
    detail: str


class FaceStore:
    """Faces of photos by content, in one file that only its owner may read. Each photo is stored at once.

    Args:
        path: SQLite database, created if missing.
        maker: what the vectors depend on besides the photo. Faces of other makers stay, unused.
    """

    def __init__(self, path: Path, maker: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._maker = maker
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS photos (maker TEXT, photo TEXT, faces TEXT NOT NULL, vectors BLOB NOT NULL, "
            "PRIMARY KEY (maker, photo))"
        )

    def close(self) -> None:
        self._database.close()

    def known(self) -> set[str]:
        """Return the photos with stored faces, or without any face."""
        rows = self._database.execute("SELECT photo FROM photos WHERE maker = ?", (self._maker,))
        return {photo for (photo,) in rows}

    def keep(self, photos: Collection[str]) -> None:
        """Delete the faces of all other photos, of every maker."""
        stored = {photo for (photo,) in self._database.execute("SELECT DISTINCT photo FROM photos")}
        with self._database:
            gone = ((photo,) for photo in sorted(stored.difference(photos)))
            self._database.executemany("DELETE FROM photos WHERE photo = ?", gone)

    def add(self, photo: str, found: Photo) -> None:
        gate = QualityGate()
        faces = [
            {"box": [round(float(side), 1) for side in face.box_xyxy], "reasons": gate.reasons(face.quality)}
            for face in found.faces
        ]
        vectors = np.array([face.vector for face in found.faces], np.float32)
        with self._database:
            self._database.execute(
                "INSERT OR REPLACE INTO photos VALUES (?, ?, ?, ?)",
                (self._maker, photo, json.dumps(faces), vectors.tobytes()),
            )

    def faces(self, photo: str) -> list[StoredFace]:
        """Return the faces of a known photo."""
        query = "SELECT faces, vectors FROM photos WHERE maker = ? AND photo = ?"
        ((listed, blob),) = self._database.execute(query, (self._maker, photo))
        faces = json.loads(listed)
        vectors = np.frombuffer(blob, np.float32).reshape(len(faces), -1 if faces else 0)
        return [
            StoredFace(face_name(photo, number), face["box"], face["reasons"], vector)
            for number, (face, vector) in enumerate(zip(faces, vectors, strict=True), start=1)
        ]


def group_album(
    photos: PhotoFolder,
    root: Path,
    output: Path,
    settings: Settings,
    risk: float,
    detail: Detail,
    advance: Callable[[int, int], None],
) -> dict[str, Any]:
    """Embed the new photos below ``root``, group all faces, write GROUPS and return its content.

    Args:
        photos: listed files below ``root``.
        output: folder of the album, created if missing.
        risk: accepted share of pairs of faces in one group that are two people, in (0, 1).
        advance: called with the numbers of finished photos and of new photos.

    Raises:
        AlbumError: there are too few or too many faces.
        PackError: the pack has no calibration.
    """
    pack = read_packs(settings.pack_paths, settings.models_path)[0]
    if pack.calibration is None:
        remedy = f"calibrate it: kith models calibrate {pack.model_id} --photos FOLDER"
        raise PackError("calibration", f"{pack.model_id} has none, so no risk can be stated; {remedy}")
    before = read_groups(output)
    output.mkdir(mode=0o700, parents=True, exist_ok=True)
    refused = [Refused(_relative(path, root), UNREADABLE, reason) for path, reason in photos.unreadable.items()]
    with _store_errors(output / FACES), closing(FaceStore(output / FACES, _maker(pack, settings, detail))) as store:
        contents = _contents(photos.photos, root, settings, refused)
        store.keep(contents.keys())
        stored = store.known()
        new = {photo: paths[0] for photo, paths in contents.items() if photo not in stored}
        if new:
            try:
                asyncio.run(_embed(new, root, store, settings, detail, refused, advance))
            except ExceptionGroup as group:  # of tasks, of which the first failure ended the others
                raise group.exceptions[0] from group
        known = store.known()
        faces = {photo: store.faces(photo) for photo in sorted(contents) if photo in known}
    paths = {photo: [_relative(path, root) for path in contents[photo]] for photo in faces}
    document = {
        "version": VERSION,
        "photos": str(root.resolve()),
        "recognizer": pack.recognition.fingerprint(),
        **_grouped(faces, paths, Calibration.from_document(pack.calibration), risk, before),
        "refused": [asdict(each) for each in sorted(refused, key=lambda each: each.photo)],
        "new_photos": len(new.keys() & known),
        "photo_count": sum(map(len, paths.values())),
    }
    with atomic_write(output / GROUPS) as file:
        # Surrogates, which stand for bytes of names that are not UTF-8, become escapes of JSON.
        file.write(json.dumps(document, indent=1, ensure_ascii=False).encode(errors="backslashreplace"))
    return document


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise AlbumError(
            f"{path}: {error}. If the file is damaged, delete it: photos are then embedded again"
        ) from error


def _maker(pack: ModelPack, settings: Settings, detail: Detail) -> str:
    parts = (
        pack.recognition.fingerprint(),
        sha256_of(pack.detection.path),
        detail,
    )
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _contents(paths: Iterable[Path], root: Path, settings: Settings, refused: list[Refused]) -> dict[str, list[Path]]:
    """Return the files by their content. A file that is too large or unreadable is refused."""
    contents: dict[str, list[Path]] = {}
    for path in sorted(paths):
        try:
            if path.stat().st_size > settings.max_image_bytes:
                raise ImageTooLargeError(f"the photo has more than {settings.max_image_bytes} bytes, the limit")
            contents.setdefault(sha256_of(path), []).append(path)
        except KithError as error:
            refused.append(Refused(_relative(path, root), error.code, error.detail))
        except OSError as error:
            refused.append(Refused(_relative(path, root), UNREADABLE, error.strerror or str(error)))
    return contents


async def _embed(
    new: Mapping[str, Path],
    root: Path,
    store: FaceStore,
    settings: Settings,
    detail: Detail,
    refused: list[Refused],
    advance: Callable[[int, int], None],
) -> None:
    """Embed and store photos, each as soon as it is embedded."""
    places, done = asyncio.Semaphore(MAX_IN_FLIGHT), 0
    async with open_faces(settings) as opened, asyncio.TaskGroup() as tasks:

        async def embed(photo: str, path: Path) -> None:
            nonlocal done
            try:
                payload = await asyncio.to_thread(path.read_bytes)
                if hashlib.sha256(payload).hexdigest() != photo:
                    raise OSError(0, "the file changed while it was read")
                found = await opened.photos.embed(payload, opened.recognizers.default, detail=detail, background=True)
                store.add(photo, found)
            except KithError as error:
                refused.append(Refused(_relative(path, root), error.code, error.detail))
            except OSError as error:
                refused.append(Refused(_relative(path, root), UNREADABLE, error.strerror or str(error)))
            finally:
                places.release()
            done += 1
            advance(done, len(new))

        for photo, path in new.items():
            await places.acquire()
            tasks.create_task(embed(photo, path))


def _grouped(
    faces: Mapping[str, Sequence[StoredFace]],
    paths: Mapping[str, Sequence[str]],
    pack: Calibration,
    risk: float,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the groups, loners and risk of the faces of photos, whose order decides between equals."""
    usable = [(number, photo, face) for number, photo in enumerate(faces) for face in faces[photo] if not face.reasons]
    poor = [(photo, face) for photo in faces for face in faces[photo] if face.reasons]
    if len(usable) < MIN_FACES:
        raise AlbumError(f"the photos show {len(usable)} usable faces; grouping needs at least {MIN_FACES}")
    if len(usable) > MAX_FACES:
        raise AlbumError(f"the photos show {len(usable):,} faces, more than {MAX_FACES:,}: group parts of the folder")
    vectors = np.stack([face.vector for *_, face in usable])
    photos = np.array([number for number, *_ in usable], np.int64)
    found = group_faces_of_album(vectors, photos, pack, risk)
    assert found.threshold is not None  # noqa: S101 - there are enough faces
    former = {} if before is None else {f["face"]: int(g["id"][1:]) for g in before["groups"] for f in g["faces"]}
    members_of = [[usable[row][2].name for row, _ in rows] for rows in found.groups]
    ids, next_id = keep_ids(members_of, former, 1 if before is None else before["next_id"])

    def entry(photo: str, face: StoredFace) -> dict[str, Any]:
        first, *copies = paths[photo]
        return {"face": face.name, "photo": first, "box": face.box} | ({"copies": copies} if copies else {})

    groups = []
    for number, rows in zip(ids, found.groups, strict=True):
        members = [entry(*usable[row][1:]) | {"certainty": round(certainty, 4)} for row, certainty in rows]
        members.sort(key=lambda face: (-face["certainty"], face["face"]))
        groups.append({"id": f"g{number}", "faces": members})
    loners = [entry(*usable[row][1:]) for row in found.singles]
    loners += [entry(photo, face) | {"reasons": face.reasons} for photo, face in poor]
    return {
        "risk": risk,
        "threshold": round(found.threshold, 3),
        "known_different_pairs": found.known_different_pairs,
        "next_id": next_id,
        "groups": groups,
        "loners": loners,
    }
