"""Files of an album that people read and write: the groups, and the names given to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from service.core.atomic_files import atomic_write

GROUPS: Final = "groups.json"
NAMES: Final = "names.txt"
VERSION: Final = 1
ID_DIGITS: Final = 16
NAMES_HELP: Final = """\
# Who is who, for 'kith enroll'. Two groups with one name become one person.
#   g1 = ada                       everyone in group g1
#   3f2a9c01d2e4b567-1 = grace     but this face is someone else
#   3f2a9c01d2e4b567-2 =           and this one is nobody to enroll
"""


class AlbumError(ValueError):
    """The album cannot be grouped, or its names cannot be read. The text says why."""


def read_groups(output: Path) -> dict[str, Any] | None:
    """Return the latest groups of an album; None if there are none.

    Raises:
        AlbumError: the file is not one of this version.
    """
    path = output / GROUPS
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if document["version"] != VERSION:
            raise AlbumError(f"{path} has version {document['version']}, not {VERSION}")
        _check(document)
        return document
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, AlbumError):
            raise
        raise AlbumError(f"{path} is damaged ({error}). Move it away; group ids then begin at 1") from error


@dataclass(frozen=True)
class NamedFace:
    """Face of a person. ``others``: boxes of the other faces of the photo."""

    face: str
    photo: Path
    box: Sequence[float]
    others: Sequence[Sequence[float]]


def _check(document: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError, ValueError: a value that is read later is missing or malformed."""
    _ = int(document["next_id"]), Path(document["photos"])
    for group in document["groups"]:
        int(group["id"].removeprefix("g"))
    for face in (*document["loners"], *(face for group in document["groups"] for face in group["faces"])):
        _ = [float(side) for side in face["box"]], str(face["face"]), str(face["photo"])


def face_name(photo: str, number: int) -> str:
    """Return the name of a face: the beginning of the SHA-256 of its photo, and its number from 1."""
    return f"{photo[:ID_DIGITS]}-{number}"


def is_face_of(face: str, photo: str) -> bool:
    """Return whether a face's name is that of a photo with this SHA-256."""
    return face.rpartition("-")[0] == photo[:ID_DIGITS]


def begin_names(output: Path) -> None:
    """Write a file of names that explains itself, unless there is one."""
    if not (output / NAMES).exists():
        with atomic_write(output / NAMES) as file:
            file.write(NAMES_HELP.encode())


def read_names(output: Path) -> dict[str, str]:
    """Return the person by id of a group or a face, from lines ``ID = PERSON``.

    An empty person means that the face is not enrolled.

    Raises:
        AlbumError: the file is missing, or a line is malformed.
    """
    from kith.wire.identifiers import normalize_id

    path = output / NAMES
    if not path.is_file():
        raise AlbumError(f"{path} is missing. Write a line 'g1 = ada' for each group that you know")
    names: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, person = (part.strip() for part in line.partition("="))
        try:
            if not equals or not key:
                raise ValueError("expected 'ID = PERSON'")
            if key in names:
                raise ValueError(f"{key} has two lines")
            names[key] = normalize_id(person) if person else ""
        except ValueError as error:
            raise AlbumError(f"{path}, line {number}: {error}") from error
    return names


def people_of(document: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, list[NamedFace]]:
    """Return the faces of each named person. The name of a face counts more than that of its group.

    Raises:
        AlbumError: an id is of no group and no face.
    """
    root = Path(document["photos"])
    faces = {face["face"]: (group["id"], face) for group in document["groups"] for face in group["faces"]}
    faces |= {face["face"]: ("", face) for face in document["loners"]}
    ids = {group["id"] for group in document["groups"]}
    if unknown := sorted(names.keys() - ids - faces.keys()):
        raise AlbumError(f"{NAMES} names {', '.join(unknown[:5])}, which {GROUPS} does not have")
    boxes: dict[str, list[tuple[str, Sequence[float]]]] = {}
    for name, (_, face) in faces.items():
        boxes.setdefault(face["photo"], []).append((name, face["box"]))
    people: dict[str, list[NamedFace]] = {}
    for name, (group, face) in faces.items():
        if person := names.get(name, names.get(group, "")):
            others = [box for other, box in boxes[face["photo"]] if other != name]
            people.setdefault(person, []).append(NamedFace(name, root / face["photo"], face["box"], others))
    return people
