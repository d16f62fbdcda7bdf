"""``kith detect``, ``embed``, ``identify`` and ``verify``: recognition in photos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    UNREADABLE,
    count_of,
    make_table,
    print_json,
    print_note,
    print_table,
    progress_bar,
    remedy_lines,
)
from service.cli.words import describe_outcome, describe_reasons, describe_result, format_odds

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
    from kith.wire.faces import PhotoOut

    report = _PhotoReport(photos, PhotoOut().model_dump(mode="json"))
    targets = _drawing_targets(report.photos, draw)
    with report.printed(DETECTIONS, server), connect(server, "temporary") as kith:
        for photo, answer in report.answers(lambda photo: kith.detect(photo, detail=detail)):
            (image,) = answer.images
            report.add(photo, image.model_dump(mode="json"), answer.images)
            for number, face in enumerate(image.faces, start=1):
                box = ", ".join(f"{value:.0f}" for value in face.box)
                usable = "yes" if face.quality.usable else describe_reasons(face.quality.reasons)
                report.rows.append((photo, number, box, f"{face.score:.2f}", f"{face.quality.score:.2f}", usable))
            if not image.faces:
                report.rows.append((photo, None, "no face"))
            if photo in targets:
                from service.cli.tools.drawing import draw_faces

                draw_faces(photo.read_bytes(), image.faces, targets[photo])
    report.require_faces()


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
    from kith.wire.faces import PhotoOut

    report = _PhotoReport(photos, PhotoOut().model_dump(mode="json"))
    source: dict[str, str | None] = {"model": None, "recognizer": None}
    try:
        with connect(server, "temporary") as kith:
            for photo, answer in report.answers(partial(kith.embed, model=model, detail=detail)):
                source = {"model": answer.model, "recognizer": answer.recognizer}
                report.add(photo, answer.images[0].model_dump(mode="json"), answer.images)
    finally:
        for photo, _, code in report.rows:
            print_note(f"{photo}: {code}: {report.documents[printable_path(photo)]['error']['detail']}")
        if report.documents and output is None:
            print_json({**source, "photos": report.documents})
        elif report.documents and output is not None:
            _write_vectors(output, report.documents, source, server)
    report.require_faces()


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
    empty: dict[str, Any] = {"gallery": gallery, "model": None, "recognizer": None, "results": [], "images": []}
    report = _PhotoReport(photos, empty)
    targets = _drawing_targets(report.photos, draw)
    options: dict[str, Any] = {
        "faces": faces,
        "top_k": top,
        "detail": detail,
        "one_face_per_person": one_face_per_person,
        "risk": risk.value(),
        "filter": {"tags": tag} if tag else None,
    }
    identified = False
    photo_column, decision_column = (Column(header, no_wrap=True) for header in ("Photo", "Decision"))
    headers = (photo_column, "Face", decision_column, "Similarity", "Threshold", "By chance")
    with report.printed(headers, server), connect(server) as kith:
        for photo, answer in report.answers(lambda photo: kith.identify(gallery, photo, **options)):
            report.add(photo, {**answer.model_dump(mode="json"), "error": None}, answer.images)
            identified = identified or any(result.outcome == "identified" for result in answer.results)
            for number, result in enumerate(answer.results, start=1):
                report.rows.append((photo, number if result.face else None, *_decision_cells(result)))
            if photo in targets:
                from service.cli.tools.drawing import draw_decisions

                draw_decisions(photo.read_bytes(), answer.results, targets[photo])
    if not identified or any(answer["error"] for answer in report.documents.values()):
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
    decision = describe_result(result)
    if result.stranger is not None:
        decision = f"{decision} {result.stranger.id}, visit {result.stranger.seen_count}"
    return decision, result.similarity, result.threshold, odds


class _PhotoReport:
    """Photos among paths and in folders, which are read as 'kith enroll' reads them, and the answer to each.

    ``rows`` are cells of the printed table. ``empty`` has the keys of an answer, for a photo that has none.

    Raises:
        typer.BadParameter: there is no photo.
    """

    def __init__(self, paths: list[Path], empty: dict[str, Any]) -> None:
        self._empty = empty
        self.documents: Documents = {}
        self.rows: list[Sequence[Any]] = []
        listed = [list_photos(path) if path.is_dir() else PhotoFolder([path]) for path in paths]
        self.photos = [photo for folder in listed for photo in folder.photos]
        self._unreadable = {path: reason for folder in listed for path, reason in folder.unreadable.items()}
        if not self.photos and not self._unreadable:
            raise typer.BadParameter(f"{', '.join(map(str, paths))}: no photos.", param_hint="PHOTOS")
        if ignored := sum(len(folder.ignored) + folder.hidden for folder in listed):
            print_note(f"{count_of(ignored, 'file')} ignored (hidden, or not a photo)")

    def add(self, photo: Path, document: dict[str, Any], images: Iterable[FaceCountOut]) -> None:
        """Add an answer, and note what it leaves out."""
        from kith.wire.faces import MAX_FACES

        self.documents[printable_path(photo)] = document
        for image in images:
            if image.truncated:
                print_note(f"{photo} shows {image.face_count:,} faces: only the {MAX_FACES} largest are listed")

    def answers(self, send: Callable[[Path], Answer]) -> Iterator[tuple[Path, Answer]]:
        """Yield each photo's answer. Of several photos, add the problem of one that cannot be read."""
        from kith import KithClientError

        count = len(self.photos) + len(self._unreadable)
        for path, reason in self._unreadable.items():
            self._refuse(path, UNREADABLE | {"detail": reason})
        with progress_bar(MofNCompleteColumn(), transient=True) as progress:
            task = progress.add_task("photos", total=len(self.photos), visible=len(self.photos) > 1)
            for photo in self.photos:
                try:
                    yield photo, send(photo)
                except OSError as error:
                    if count == 1:
                        raise
                    self._refuse(photo, UNREADABLE | {"detail": error.strerror or str(error)})
                except KithClientError as error:
                    if not error.code.startswith("image_"):
                        raise
                    if count == 1:
                        error.problem["detail"] = f"{photo}: {error.problem['detail']}"
                        raise
                    self._refuse(photo, error.problem)
                progress.advance(task)
        if refused := sum(1 for answer in self.documents.values() if answer["error"]):
            print_note(f"{count_of(refused, 'photo')} of {count} cannot be read")

    @contextmanager
    def printed(self, headers: Sequence[str | Column], server: ServerOptions) -> Iterator[None]:
        """Print the answers even if a later photo ends the command, so that no photo has to be sent twice."""

        def print_text() -> None:
            print_table(make_table(*headers, rows=self.rows))
            for line in remedy_lines(answer["error"] for answer in self.documents.values() if answer["error"]):
                print_note(line)

        try:
            yield
        finally:
            if self.documents:
                server.answer(self.documents, print_text)

    def require_faces(self) -> None:
        """Raises typer.Exit: a photo shows no face, or cannot be read."""
        if not all(answer.get("faces") for answer in self.documents.values()):
            raise typer.Exit(EXIT_NO)

    def _refuse(self, photo: Path, problem: dict[str, Any]) -> None:
        self.documents[printable_path(photo)] = {**self._empty, "error": problem}
        self.rows.append((photo, None, problem["code"]))


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
