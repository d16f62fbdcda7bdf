"""Photos: ``detect``, ``embed``, ``identify``, ``verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn
from rich.table import Table

from service.commands.completion import complete_galleries, complete_served, complete_subjects
from service.commands.options import (
    AsJson,
    Fmr,
    Fpir,
    Gallery,
    Key,
    Photos,
    Preset,
    Threshold,
    Url,
    risk_of,
)
from service.commands.remedies import remedies_of
from service.connection import connect
from service.terminal import SAID_NO, print_json, print_table, progress, remark, say
from service.words import decision, in_words, odds

if TYPE_CHECKING:
    from service.api.schemas import IdentityOut, VerifyOut

PICTURES: Final = (".jpg", ".jpeg", ".png")

Draw = Annotated[
    Path | None,
    typer.Option(
        metavar="PICTURE", help="Write the photo with its faces here (.jpg, .png); of several photos, a folder."
    ),
]


def detect(photos: Photos, draw: Draw = None, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Where the faces are, and how good.

    Exit 1 if a photo shows none."""
    targets = _pictures(photos, draw)
    table = Table("Photo", "Face", "Box (x0, y0, x1, y1)", "Score", "Quality", "Usable")
    answers: dict[str, Any] = {}
    found = 0
    with _told_in_the_end(answers, table, as_json), connect(url, api_key) as kith:
        for photo, answer in _each(photos, lambda photo: kith.detect(photo)):
            if isinstance(answer, dict):
                answers[str(photo)] = answer
                table.add_row(escape(str(photo)), "", "", "", "", answer["error"]["code"])
                continue
            (image,) = answer.images
            found += bool(image.faces)
            answers[str(photo)] = image.model_dump(mode="json", exclude_none=True)
            if not image.faces:
                table.add_row(escape(str(photo)), "", "no face", "", "", "")
            for number, face in enumerate(image.faces, start=1):
                box = ", ".join(f"{value:.0f}" for value in face.box)
                usable = "yes" if face.quality.usable else in_words(face.quality.reasons)
                values = (f"{face.score:.2f}", f"{face.quality.score:.2f}", usable)
                table.add_row(escape(str(photo)), str(number), box, *values)
            if photo in targets:
                from service.drawing import draw_faces

                draw_faces(photo.read_bytes(), image.faces, targets[photo])
    if found < len(photos):
        raise typer.Exit(SAID_NO)


def embed(
    photos: Photos,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the vectors here: FILE.npy, one row a face (float32, unit length)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="By which served pack; default: the server's.", autocompletion=complete_served)
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """A vector for every face, as JSON, or into a file.

    Exit 1 if a photo shows no face."""
    if output is not None:
        _check_file(output, "--output", (".npy",))
    rows: list[dict[str, Any]] = []
    answers: dict[str, Any] = {}
    shown, recogniser, pack = 0, None, None
    try:
        with connect(url, api_key) as kith:
            for photo, answer in _each(photos, lambda photo: kith.embed(photo, model=model)):
                if isinstance(answer, dict):
                    answers[str(photo)] = answer
                    remark(f"{photo}: {answer['error']['code']}: {answer['error']['detail']}")
                    continue
                (image,) = answer.images
                shown += bool(image.faces)
                recogniser, pack = answer.recogniser, answer.model
                answers[str(photo)] = document = image.model_dump(mode="json", exclude_none=True)
                rows += [
                    {"photo": str(photo), "face": number, "box": face["box"], "embedding": face["embedding"]}
                    for number, face in enumerate(document["faces"], start=1)
                ]
    finally:
        by = {"model": pack, "recogniser": recogniser}
        if answers and output is None:
            print_json({**by, "photos": answers})
        elif answers and output is not None:
            _write_vectors(output, rows, by, as_json)
    if shown < len(photos):
        raise typer.Exit(SAID_NO)


def identify(
    photos: Photos,
    gallery: Gallery,
    fpir: Fpir = None,
    fmr: Fmr = None,
    threshold: Threshold = None,
    preset: Preset = None,
    faces: Annotated[Literal["all", "largest"], typer.Option(help="Which faces of a photo.")] = "all",
    top: Annotated[int, typer.Option(min=1, max=100, help="Candidates of each face in the JSON.")] = 5,
    tag: Annotated[list[str] | None, typer.Option(help="Only among people who bear it; repeatable: all.")] = None,
    draw: Draw = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say who is in the photos, or that they are unknown.

    Exit 1 if nobody was identified, or a photo could not be read."""
    targets = _pictures(photos, draw)
    options: dict[str, Any] = {"faces": faces, "top_k": top}
    if (risk := risk_of(fpir, fmr, threshold, preset)) is not None:
        options["risk"] = risk
    if tag:
        options["filter"] = {"tags": tag}
    table = Table("Photo", "Face", "Decision", "Similarity", "Threshold", "A stranger is so alike")
    answers: dict[str, Any] = {}
    identified = 0
    with _told_in_the_end(answers, table, as_json), connect(url, api_key) as kith:
        for photo, answer in _each(photos, lambda photo: kith.identify(gallery, photo, **options)):
            if isinstance(answer, dict):
                answers[str(photo)] = answer
                table.add_row(escape(str(photo)), "", answer["error"]["code"], "", "", "")
                continue
            answers[str(photo)] = answer.model_dump(mode="json", exclude_none=True)
            for number, result in enumerate(answer.results, start=1):
                identified += result.outcome == "identified"
                table.add_row(escape(str(photo)), str(number) if result.face else "", *_cells(result))
            if photo in targets:
                from service.drawing import draw_decisions

                draw_decisions(photo.read_bytes(), answer.results, targets[photo], gallery)
    if not identified or any("error" in answer for answer in answers.values()):
        raise typer.Exit(SAID_NO)


def verify(
    a: Annotated[Path, typer.Argument(help="A photo.", exists=True, dir_okay=False)],
    b: Annotated[
        Path | None, typer.Argument(help="Another; or --subject and --gallery.", exists=True, dir_okay=False)
    ] = None,
    subject: Annotated[
        str | None, typer.Option(help="Instead of B: who is enrolled.", autocompletion=complete_subjects)
    ] = None,
    gallery: Annotated[
        str | None, typer.Option("--gallery", "-g", help="Of --subject.", autocompletion=complete_galleries)
    ] = None,
    fpir: Fpir = None,
    fmr: Fmr = None,
    threshold: Threshold = None,
    preset: Preset = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Are two photos of the same person, or is this the person who is enrolled?

    At FMR 0.001, unless another risk is named, or the gallery of --subject has an FMR or a threshold. Exit 1 if not,
    or if it cannot be said."""
    if (subject is None) == (b is None) or (subject is None) != (gallery is None):
        raise typer.BadParameter("name another photo, or --subject with its --gallery", param_hint="B")
    risk: dict[str, Any] = risk_of(fpir, fmr, threshold, preset) or {}
    other: Path | tuple[str, str]
    if b is not None:
        other = b
    else:
        assert gallery is not None and subject is not None  # noqa: S101 - seen above
        other = (gallery, subject)
    with connect(url, api_key) as kith:
        answer = kith.verify(a, other, **risk)
    if as_json:
        print_json(answer.model_dump(mode="json", exclude_none=True))
    else:
        say(_told(answer, {"a": str(a), "b": str(b or subject)}))
    if answer.outcome != "same":
        raise typer.Exit(SAID_NO)


def _write_vectors(output: Path, rows: list[dict[str, Any]], by: dict[str, str | None], as_json: bool) -> None:
    """Without a face, no file: how long its rows would be is not known."""
    if rows:
        import numpy as np

        from service.files import replacing

        with replacing(output) as to:
            np.save(to, np.array([row["embedding"] for row in rows], np.float32))
    listed = [{key: row[key] for key in ("photo", "face", "box")} for row in rows]
    if as_json:
        print_json({**by, "file": str(output) if rows else None, "rows": listed})
        return
    if not rows:
        remark(f"no face: {output} was not written")
        return
    table = Table("Row", "Photo", "Face")
    for index, row in enumerate(rows):
        table.add_row(str(index), escape(row["photo"]), str(row["face"]))
    print_table(table)
    remark(f"wrote {output}: {len(rows)} vectors of {by['model']}, recogniser {by['recogniser']}")


def _told(answer: VerifyOut, names: dict[str, str]) -> str:
    outcome = decision(answer.outcome, None)
    if answer.similarity is None and answer.review_threshold is not None:
        return f"{outcome}: similarity below {answer.review_threshold:.3f}"
    if answer.similarity is None or answer.threshold is None or answer.risk is None:
        seen = (
            names[side] if what == answer.outcome else f"{names[side]}: {in_words([what])}"
            for side, _, what in (reason.partition(": ") for reason in answer.reasons)
        )
        return f"{outcome}: {', '.join(seen)}"
    kinds = (("FMR", answer.risk.fmr), ("FPIR", answer.risk.fpir), ("threshold", answer.risk.threshold))
    asked = next(f"{kind} {value:g}" for kind, value in kinds if value is not None)
    chance = answer.false_match_probability
    alike = "" if chance is None else f"; two different people are so alike in {odds(chance)} comparisons"
    return f"{outcome}: similarity {answer.similarity:.3f}, threshold {answer.threshold:.3f} at {asked}{alike}"


def _cells(result: IdentityOut) -> tuple[str, str, str, str]:
    chance = result.false_alarm_probability
    return (
        escape(decision(result.outcome, result.name or result.subject)),
        "" if result.similarity is None else f"{result.similarity:.3f}",
        "" if result.threshold is None else f"{result.threshold:.3f}",
        "" if chance is None else odds(chance),
    )


@contextmanager
def _told_in_the_end(answers: dict[str, Any], table: Table, as_json: bool) -> Iterator[None]:
    """Whatever ends the block: of many photos, those that were answered for are not to be sent again."""
    try:
        yield
    finally:
        if answers:
            if as_json:
                print_json(answers)
            else:
                print_table(table)
                for line in remedies_of(answer["error"] for answer in answers.values() if "error" in answer):
                    remark(line)


def _each(photos: list[Path], ask: Callable[[Path], Any]) -> Iterator[tuple[Path, Any]]:
    """Each photo's answer; of one that is none, ``{"error": problem}``. A bar where there are several."""
    from service.client import KithClientError

    with progress(MofNCompleteColumn(), transient=True) as shown:
        bar = shown.add_task("photos", total=len(photos), visible=len(photos) > 1)
        for photo in photos:
            try:
                answer = ask(photo)
            except KithClientError as error:
                if not error.code.startswith("image_") or len(photos) == 1:
                    raise
                answer = {"error": error.problem}
            yield photo, answer
            shown.advance(bar)


def _pictures(photos: list[Path], draw: Path | None) -> dict[Path, Path]:
    """Where each photo's picture goes. Raises typer.BadParameter: nowhere, or onto a photo."""
    if draw is None:
        return {}
    if len(photos) == 1 and not draw.is_dir():
        _check_file(draw, "--draw", PICTURES)
        targets, folder = {photos[0]: draw}, draw.parent
    else:
        if draw.suffix.lower() in PICTURES and not draw.is_dir():
            raise typer.BadParameter(
                f"{len(photos)} photos need a folder, and {draw} names a file", param_hint="--draw"
            )
        targets, folder = _in_folder(photos, draw), draw
    originals = {_file_of(photo) for photo in photos}
    for target in targets.values():
        if target.exists() and _file_of(target) in originals:
            raise typer.BadParameter(f"{target} is one of the photos: name another place", param_hint="--draw")
    folder.mkdir(parents=True, exist_ok=True)
    return targets


def _in_folder(photos: list[Path], folder: Path) -> dict[Path, Path]:
    """By the photos' names; counted up where one is taken, by letters of either size, which some file systems do not
    tell apart."""
    taken: set[str] = set()
    targets: dict[Path, Path] = {}
    for photo in photos:
        again = count(2)
        name = photo.stem
        while name.casefold() in taken:
            name = f"{photo.stem}-{next(again)}"
        taken.add(name.casefold())
        targets[photo] = folder / f"{name}.jpg"
    return targets


def _file_of(path: Path) -> tuple[int, int]:
    """Whatever the links are by which it is named."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _check_file(path: Path, option: str, suffixes: tuple[str, ...]) -> None:
    if path.suffix.lower() not in suffixes or not path.parent.is_dir():
        raise typer.BadParameter(
            f"{path} must be a {' or '.join(suffixes)} file in a folder that exists", param_hint=option
        )
