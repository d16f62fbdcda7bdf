"""``kith detect``, ``embed``, ``identify`` and ``verify``: recognition in photos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer
from rich.progress import MofNCompleteColumn
from rich.table import Column

from models.vision.photo_files import PhotoFolder, list_photos, printable_path
from service.cli.connection import connect
from service.cli.options import DetailOption, GalleryOption, PhotosOrFolders, RiskOptions, ServerOptions, check_file
from service.cli.terminal import (
    EXIT_NO,
    UNREADABLE_REMEDY,
    count_of,
    make_table,
    print_json,
    print_note,
    print_table,
    progress_bar,
    remedy_lines,
)
from service.core.text import describe_outcome, describe_reasons, format_odds

if TYPE_CHECKING:
    from kith.wire.faces import FaceCountOut
    from kith.wire.identification import IdentityOut
    from kith.wire.verification import VerifyOut

IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png")
DETECTIONS: Final = ("Photo", "Face", "Box (x0, y0, x1, y1)", "Score", "Quality", "Usable")
Answer = TypeVar("Answer")
Documents = dict[str, dict[str, Any]]
"""JSON of the answer to each photo. ``error``: problem of one of several photos that cannot be read, else None."""

Draw = Annotated[
    Path | None,
    typer.Option(metavar="PICTURE", help="Write the annotated photo to this .jpg or .png file; or photos to a folder."),
]


def detect(photos: PhotosOrFolders, server: ServerOptions, draw: Draw = None, detail: DetailOption = None) -> None:
    """Detect faces and measure their quality.

    Exit status 1 if a photo shows no face."""
    found = _photos_in(photos)
    targets = _drawing_targets(found.photos, draw)
    rows: list[Sequence[object]] = []
    answers: Documents = {}

    def refuse(photo: Path, problem: dict[str, Any]) -> None:
        rows.append((photo, None, None, None, None, problem["code"]))

    from kith.wire.faces import PhotoOut

    empty = PhotoOut().model_dump(mode="json")
    with _print_on_exit(answers, DETECTIONS, rows, server), connect(server, "temporary") as kith:
        for photo, answer in _answers(found, answers, lambda photo: kith.detect(photo, detail=detail), refuse, empty):
            (image,) = answer.images
            _note_truncation(photo, image)
            answers[printable_path(photo)] = image.model_dump(mode="json")
            for number, face in enumerate(image.faces, start=1):
                box = ", ".join(f"{value:.0f}" for value in face.box)
                usable = "yes" if face.quality.usable else describe_reasons(face.quality.reasons)
                rows.append((photo, number, box, f"{face.score:.2f}", f"{face.quality.score:.2f}", usable))
            if not image.faces:
                rows.append((photo, None, "no face"))
            if photo in targets:
                from service.cli.tools.drawing import draw_faces

                draw_faces(photo.read_bytes(), image.faces, targets[photo])
    _require_faces(answers)


def embed(
    photos: PhotosOrFolders,
    server: ServerOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write vectors to FILE.npy: one float32 row of unit length per face."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served pack. Default: the server's.")] = None,
    detail: DetailOption = None,
) -> None:
    """Compute the embedding of every face.

    Exit status 1 if a photo shows no face."""
    check_file(output, "--output", ".npy")
    found = _photos_in(photos)
    source: dict[str, str | None] = {"model": None, "recognizer": None}
    answers: Documents = {}

    def refuse(photo: Path, problem: dict[str, Any]) -> None:
        print_note(f"{photo}: {problem['code']}: {problem['detail']}")

    from kith.wire.faces import PhotoOut

    empty = PhotoOut().model_dump(mode="json")
    try:
        with connect(server, "temporary") as kith:
            send = partial(kith.embed, model=model, detail=detail)
            for photo, answer in _answers(found, answers, send, refuse, empty):
                source = {"model": answer.model, "recognizer": answer.recognizer}
                _note_truncation(photo, answer.images[0])
                answers[printable_path(photo)] = answer.images[0].model_dump(mode="json")
    finally:
        if answers and output is None:
            print_json({**source, "photos": answers})
        elif answers and output is not None:
            _write_vectors(output, answers, source, server)
    _require_faces(answers)


def identify(
    photos: PhotosOrFolders,
    gallery: GalleryOption,
    risk: RiskOptions,
    server: ServerOptions,
    faces: Annotated[Literal["all", "largest"], typer.Option(help="Faces to search for.")] = "all",
    top: Annotated[int, typer.Option(min=1, max=100, help="Candidates per face in the JSON.")] = 5,
    tag: Annotated[list[str] | None, typer.Option(help="Search subjects with this tag; repeatable: all tags.")] = None,
    draw: Draw = None,
    detail: DetailOption = None,
    one_face_per_person: Annotated[
        bool | None,
        typer.Option(help="Identify a person in at most one face of a photo; default: the gallery's setting."),
    ] = None,
) -> None:
    """Search a gallery for the faces in photos, or in the photos of folders.

    Exit status 1 if no face is identified, or a photo cannot be read."""
    found = _photos_in(photos)
    targets = _drawing_targets(found.photos, draw)
    options: dict[str, Any] = {
        "faces": faces,
        "top_k": top,
        "detail": detail,
        "one_face_per_person": one_face_per_person,
    }
    if (accepted := risk.value()) is not None:
        options["risk"] = accepted
    if tag:
        options["filter"] = {"tags": tag}
    rows: list[Sequence[object]] = []
    answers: Documents = {}
    identified = False

    def refuse(photo: Path, problem: dict[str, Any]) -> None:
        rows.append((photo, None, problem["code"]))

    photo_column, decision_column = (Column(header, no_wrap=True) for header in ("Photo", "Decision"))
    headers = (photo_column, "Face", decision_column, "Similarity", "Threshold", "By chance")
    empty: dict[str, Any] = {"gallery": gallery, "model": None, "recognizer": None, "results": [], "images": []}
    with _print_on_exit(answers, headers, rows, server), connect(server) as kith:
        for photo, answer in _answers(
            found, answers, lambda photo: kith.identify(gallery, photo, **options), refuse, empty
        ):
            answers[printable_path(photo)] = {**answer.model_dump(mode="json"), "error": None}
            for image in answer.images:
                _note_truncation(photo, image)
            identified = identified or any(result.outcome == "identified" for result in answer.results)
            for number, result in enumerate(answer.results, start=1):
                rows.append((photo, number if result.face else None, *_decision_cells(result)))
            if photo in targets:
                from service.cli.tools.drawing import draw_decisions

                draw_decisions(photo.read_bytes(), answer.results, targets[photo])
    if not identified or any(answer["error"] for answer in answers.values()):
        raise typer.Exit(EXIT_NO)


def verify(
    a: Annotated[Path, typer.Argument(help="Photo.", exists=True, dir_okay=False)],
    risk: RiskOptions,
    server: ServerOptions,
    b: Annotated[
        Path | None, typer.Argument(help="Second photo, unless --subject is given.", exists=True, dir_okay=False)
    ] = None,
    subject: Annotated[str | None, typer.Option(help="Enrolled subject to compare with.")] = None,
    gallery: Annotated[str | None, typer.Option("--gallery", "-g", help="Gallery of --subject.")] = None,
    detail: DetailOption = None,
) -> None:
    """Compare a photo with another photo, or with an enrolled subject.

    The default risk is FMR 0.001, or the FMR or threshold of the gallery. Exit status 1 if the two are not the same
    person, or the photos do not allow a decision."""
    if (subject is None) == (b is None) or (subject is None) != (gallery is None):
        raise typer.BadParameter("Give a second photo, or --subject and --gallery.", param_hint="B")
    other: Path | tuple[str, str]
    if b is not None:
        other = b
    else:
        assert gallery is not None and subject is not None  # noqa: S101 - checked above
        other = (gallery, subject)
    accepted = risk.value()
    with connect(server, "temporary" if subject is None else "refuse") as kith:
        answer = kith.verify(a, other, risk=accepted, detail=detail)
    text = _describe_verdict(answer, {"a": str(a), "b": str(b or subject)})
    server.answer(answer.model_dump(mode="json"), text, ok=answer.outcome == "same")


def _write_vectors(output: Path, answers: Documents, source: dict[str, str | None], server: ServerOptions) -> None:
    """Write embeddings to a .npy file, and list its rows. Without a face there is no row length, so no file."""
    faces = [
        (photo, number, face)
        for photo, answer in answers.items()
        for number, face in enumerate(answer.get("faces", ()), start=1)
    ]
    if faces:
        import numpy as np

        from service.core.atomic_files import atomic_write

        with atomic_write(output) as file:
            np.save(file, np.array([face["embedding"] for *_, face in faces], np.float32))

    def print_text() -> None:
        if not faces:
            print_note(f"No face was found, so {output} was not written.")
            return
        cells = ((index, photo, number) for index, (photo, number, _) in enumerate(faces))
        print_table(make_table("Row", "Photo", "Face", rows=cells))
        print_note(f"Wrote {output}: {len(faces)} vectors of {source['model']}, recognizer {source['recognizer']}")

    rows = [{"photo": photo, "face": number, "box": face["box"]} for photo, number, face in faces]
    server.answer({**source, "file": str(output) if faces else None, "rows": rows}, print_text)


def _describe_verdict(answer: VerifyOut, names: dict[str, str]) -> str:
    outcome = describe_outcome(answer.outcome, None)
    if answer.similarity is None and answer.review_threshold is not None:
        return f"{outcome}: similarity below {answer.review_threshold:.3f}"
    if answer.similarity is None or answer.threshold is None or answer.risk is None:
        reasons = (
            names[side] if reason == answer.outcome else f"{names[side]}: {describe_reasons([reason])}"
            for side, _, reason in (each.partition(": ") for each in answer.reasons)
        )
        return f"{outcome}: {', '.join(reasons)}"
    kinds = (("FMR", answer.risk.fmr), ("FPIR", answer.risk.fpir), ("threshold", answer.risk.threshold))
    risk = next(f"{kind} {value:g}" for kind, value in kinds if value is not None)
    chance = answer.false_match_probability
    odds = "" if chance is None else format_odds(chance, answer.probability_is_bound)
    by_chance = odds and f"; two people score this high in {odds} comparisons"
    return f"{outcome}: similarity {answer.similarity:.3f}, threshold {answer.threshold:.3f} at {risk}{by_chance}"


def _decision_cells(result: IdentityOut) -> tuple[object, ...]:
    chance = result.false_alarm_probability
    odds = None if chance is None else format_odds(chance, result.probability_is_bound)
    likely = next((each.name or each.subject for each in result.candidates), None)
    decision = describe_outcome(result.outcome, result.name or result.subject or likely)
    if result.stranger is not None:
        decision = f"{decision} {result.stranger.id}, visit {result.stranger.seen_count}"
    return decision, result.similarity, result.threshold, odds


def _require_faces(answers: Documents) -> None:
    """Raises typer.Exit: a photo shows no face, or cannot be read."""
    if not all(answer.get("faces") for answer in answers.values()):
        raise typer.Exit(EXIT_NO)


@contextmanager
def _print_on_exit(
    answers: Documents, headers: Sequence[str | Column], rows: list[Sequence[object]], server: ServerOptions
) -> Iterator[None]:
    """Print the answers even if a later photo ends the command, so that no photo has to be sent twice."""

    def print_text() -> None:
        print_table(make_table(*headers, rows=rows))
        for line in remedy_lines(answer["error"] for answer in answers.values() if answer["error"]):
            print_note(line)

    try:
        yield
    finally:
        if answers:
            server.answer(answers, print_text)


def _photos_in(paths: list[Path]) -> PhotoFolder:
    """Return the photos among the paths, and those of folders, read as 'kith enroll' reads them.

    Raises:
        typer.BadParameter: there is none.
    """
    found = PhotoFolder()
    for path in paths:
        listed = list_photos(path) if path.is_dir() else PhotoFolder([path])
        found.photos += listed.photos
        found.ignored |= listed.ignored
        found.unreadable |= listed.unreadable
        found.hidden += listed.hidden
    if not found.photos and not found.unreadable:
        raise typer.BadParameter(f"{', '.join(map(str, paths))}: no photos.", param_hint="PHOTOS")
    if ignored := len(found.ignored) + found.hidden:
        print_note(f"{count_of(ignored, 'file')} ignored (hidden, or not a photo)")
    return found


def _answers(
    found: PhotoFolder,
    answers: Documents,
    send: Callable[[Path], Answer],
    refuse: Callable[[Path, dict[str, Any]], None],
    empty: dict[str, Any],
) -> Iterator[tuple[Path, Answer]]:
    """Yield each photo's answer. If one of several photos cannot be read, add its problem to ``answers``.

    ``empty``: the keys of an answer, for a photo that has none."""
    from kith import KithClientError

    several = len(found.photos) + len(found.unreadable) > 1

    def add(photo: Path, problem: dict[str, Any]) -> None:
        answers[printable_path(photo)] = {**empty, "error": problem}
        refuse(photo, problem)

    for path, reason in found.unreadable.items():
        add(path, _unreadable(reason))
    with progress_bar(MofNCompleteColumn(), transient=True) as progress:
        task = progress.add_task("photos", total=len(found.photos), visible=len(found.photos) > 1)
        for photo in found.photos:
            try:
                yield photo, send(photo)
            except OSError as error:
                if not several:
                    raise
                add(photo, _unreadable(error.strerror or str(error)))
            except KithClientError as error:
                if not error.code.startswith("image_"):
                    raise
                if not several:
                    error.problem["detail"] = f"{photo}: {error.problem['detail']}"
                    raise
                add(photo, error.problem)
            progress.advance(task)
    if refused := sum(1 for answer in answers.values() if answer["error"]):
        print_note(f"{count_of(refused, 'photo')} of {len(found.photos) + len(found.unreadable)} cannot be read")


def _note_truncation(photo: Path, image: FaceCountOut) -> None:
    from kith.wire.faces import MAX_FACES

    if image.truncated:
        print_note(f"{photo} shows {image.face_count:,} faces: only the {MAX_FACES} largest are listed")


def _unreadable(reason: str) -> dict[str, Any]:
    return {"code": "unreadable", "detail": reason, "remedy": UNREADABLE_REMEDY}


def _drawing_targets(photos: list[Path], draw: Path | None) -> dict[Path, Path]:
    """Return the file to draw each photo to. Raises typer.BadParameter if it cannot be written or is a photo."""
    if draw is None:
        return {}
    if len(photos) == 1 and not draw.is_dir():
        check_file(draw, "--draw", *IMAGE_SUFFIXES)
        targets, folder = {photos[0]: draw}, draw.parent
    else:
        if draw.suffix.lower() in IMAGE_SUFFIXES and not draw.is_dir():
            raise typer.BadParameter(f"{draw} is a file. Several photos need a folder.", param_hint="--draw")
        targets, folder = _targets_in_folder(photos, draw), draw
    originals = {_inode(photo) for photo in photos}
    for target in targets.values():
        if target.exists() and _inode(target) in originals:
            raise typer.BadParameter(f"{target} is one of the photos. Name another place.", param_hint="--draw")
    folder.mkdir(parents=True, exist_ok=True)
    return targets


def _targets_in_folder(photos: list[Path], folder: Path) -> dict[Path, Path]:
    """Name pictures after their photos, numbered if equal. Names ignore case, as some file systems do."""
    taken: set[str] = set()
    targets: dict[Path, Path] = {}
    for photo in photos:
        numbers = count(2)
        name = photo.stem
        while name.casefold() in taken:
            name = f"{photo.stem}-{next(numbers)}"
        taken.add(name.casefold())
        targets[photo] = folder / f"{name}.jpg"
    return targets


def _inode(path: Path) -> tuple[int, int]:
    """Return the identity of a file, the same for every link to it."""
    status = path.stat()
    return status.st_dev, status.st_ino
