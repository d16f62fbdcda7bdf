"""Pictures of an album's faces: photos of named people to enroll, and a page on which a person names the groups."""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.vision.photo_files import printable_path
from service.cli.tools.album_names import NAMES, NamedFace, is_face_of
from service.core.atomic_files import atomic_write
from service.core.errors import KithError
from service.inference.images import ImageLimits, PhotoDecoder
from service.settings import Settings

MARGIN: Final = 0.75
"""Space on each side of a face, in units of its longer side: detectors need some context."""
GRAY: Final = 128
JPEG_QUALITY: Final = 95
THUMBNAIL_PX: Final = 112
THUMBNAIL_QUALITY: Final = 80
MAX_SHOWN_GROUPS: Final = 300
SHOWN_CERTAIN, SHOWN_UNCERTAIN = 8, 4
"""Faces of a group on the page: the most and the least certain."""
Pixels = NDArray[np.uint8]


def write_people(people: Mapping[str, Sequence[NamedFace]], folder: Path, settings: Settings) -> dict[str, str]:
    """Write PERSON/FACE.jpg for each face, and return the reason of each face that cannot be cut, by photo.

    The other faces of a photo are painted over, so that each picture shows one face. The same face gives the same
    bytes each time.
    """
    failed: dict[str, str] = {}
    by_photo: dict[Path, list[tuple[str, NamedFace]]] = {}
    for person, faces in people.items():
        (folder / person).mkdir(mode=0o700)
        for face in faces:
            by_photo.setdefault(face.photo, []).append((person, face))
    for photo, wanted in by_photo.items():
        try:
            pixels = _read(photo, settings, wanted[0][1].face)
            for person, face in wanted:
                content = _jpeg(cut(pixels, face.box, face.others), JPEG_QUALITY)
                (folder / person / f"{face.face}.jpg").write_bytes(content)
        except KithError as error:
            failed[printable_path(photo)] = error.detail
        except OSError as error:
            failed[printable_path(photo)] = error.strerror or str(error)
    return failed


def cut(pixels: Pixels, box: Sequence[float], others: Iterable[Sequence[float]]) -> Pixels:
    """Return the part of a (h, w, 3) photo around a box x0, y0, x1, y1, with other boxes painted gray."""
    height, width = pixels.shape[:2]

    def area(sides: Sequence[float], margin: float = 0.0) -> tuple[slice, slice]:
        x0, y0, x1, y1 = sides
        left, right = (min(max(round(x), 0), width) for x in (x0 - margin, x1 + margin))
        top, bottom = (min(max(round(y), 0), height) for y in (y0 - margin, y1 + margin))
        return slice(top, bottom), slice(left, right)

    painted = pixels.copy()
    for other in others:
        painted[area(other)] = GRAY
    painted[area(box)] = pixels[area(box)]
    return painted[area(box, MARGIN * max(box[2] - box[0], box[3] - box[1]))]


def write_page(
    document: Mapping[str, Any], target: Path, settings: Settings, advance: Callable[[int, int], None]
) -> None:
    """Write a page of the largest groups with faces of each, which needs no other file and no network.

    Args:
        document: content of the groups file.
        advance: called with the numbers of finished and of all photos.
    """
    root, shown = Path(document["photos"]), document["groups"][:MAX_SHOWN_GROUPS]
    chosen = [_shown(group["faces"]) for group in shown]
    by_photo: dict[str, list[dict[str, Any]]] = {}
    for face in (face for faces in chosen for face in faces):
        by_photo.setdefault(face["photo"], []).append(face)
    pictures: dict[str, str] = {}
    for number, (photo, faces) in enumerate(by_photo.items(), start=1):
        try:
            pixels = _read(root / photo, settings, faces[0]["face"])
            pictures |= {face["face"]: _thumbnail(cut(pixels, face["box"], ())) for face in faces}
        except (KithError, OSError):
            pass  # the page shows the name of the photo
        advance(number, len(by_photo))
    sections = [_section(group, faces, pictures) for group, faces in zip(shown, chosen, strict=True)]
    rest = len(document["groups"]) - len(shown)
    end = f"<p>{rest:,} smaller groups are in groups.json.</p>" if rest else ""
    with atomic_write(target) as file:
        file.write(PAGE.format(names=NAMES, sections="\n".join(sections), end=end).encode())


def _shown(faces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(faces) <= SHOWN_CERTAIN + SHOWN_UNCERTAIN:
        return list(faces)
    return [*faces[:SHOWN_CERTAIN], *faces[-SHOWN_UNCERTAIN:]]


def _section(group: Mapping[str, Any], faces: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
    cells = [
        f"<figure>{_image(pictures.get(face['face']), face['photo'])}"
        f"<figcaption>{html.escape(face['face'])}<br>{face['certainty']:.0%}</figcaption></figure>"
        for face in faces
    ]
    title = f"{group['id']} <small>{len(group['faces']):,} faces</small>"
    return f"<section><h2>{title}</h2>{''.join(cells)}</section>"


def _image(picture: str | None, photo: str) -> str:
    name = html.escape(printable_path(photo), quote=True)
    return name if picture is None else f'<img src="data:image/jpeg;base64,{picture}" alt="{name}" title="{name}">'


def _thumbnail(pixels: Pixels) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    return base64.b64encode(_jpeg(np.asarray(image, np.uint8), THUMBNAIL_QUALITY)).decode()


def _jpeg(pixels: Pixels, quality: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _read(photo: Path, settings: Settings, face: str) -> Pixels:
    """Return the upright photo. Raises ImageError, and OSError if it is not the photo in which the face was found."""
    with photo.open("rb") as file:
        payload = file.read(settings.max_image_bytes + 1)
    if not is_face_of(face, hashlib.sha256(payload).hexdigest()):
        raise OSError(errno.ESTALE, "the photo changed since it was grouped: run 'kith group' again")
    with closing(PhotoDecoder(ImageLimits(settings.max_image_bytes, settings.max_image_pixels))) as decoder:
        return decoder.decode(payload)


PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Album</title>
<style>
body {{ font: 15px sans-serif; margin: 1.5rem; }}
figure {{ display: inline-block; margin: 0 .5rem .5rem 0; vertical-align: top; width: 9rem; overflow-wrap: anywhere; }}
img {{ display: block; height: 7rem; }}
figcaption, small {{ color: #595959; font-size: 12px; }}
</style>
<p>Write a line <code>g1 = ada</code> in <code>{names}</code> for each group that you know.
A line with the name of a face, such as <code>3f2a9c01d2e4b567-1 =</code>, takes it out of its group.
The percentage is the chance that the face belongs to the group. The least certain faces come last.</p>
{sections}
{end}
</html>
"""
