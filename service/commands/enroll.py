"""``kith enroll``: a folder per person, or an archive of such, into a gallery."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from service.commands.completion import complete_galleries
from service.commands.options import (
    AllowDuplicate,
    AllowInconsistent,
    AllowLowQuality,
    AllowNotLive,
    AsJson,
    Key,
    LargestFace,
    Url,
)
from service.commands.remedies import remedies_of, remedy_of
from service.connection import connect
from service.files import replacing
from service.terminal import INTERRUPTED, SAID_NO, print_json, print_table, progress, remark, say

if TYPE_CHECKING:
    from service.api.schemas import JobOut
    from service.client import Archive, Kith

CANCEL_S: Final = 30.0
REPORTS: Final = (".csv", ".ndjson")
COLUMNS: Final = ("photo", "status", "code", "detail")


@dataclass
class Report:
    """What became of the photos: one row each, of COLUMNS; ``status`` is done or refused."""

    enrolled: int = 0
    already_enrolled: int = 0
    ignored: int = 0
    interrupted: bool = False
    jobs: list[str] = field(default_factory=list)
    photos: list[dict[str, str]] = field(default_factory=list)
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The first of each code."""

    @property
    def refused(self) -> list[dict[str, str]]:
        return [photo for photo in self.photos if photo["status"] == "refused"]


def enroll(
    source: Annotated[
        Path, typer.Argument(help="A folder per person, photos inside; or a zip, tar, tar.gz, tar.zst.", exists=True)
    ],
    gallery: Annotated[
        str,
        typer.Option("--gallery", "-g", help="Which gallery; made if need be.", autocompletion=complete_galleries),
    ],
    largest_face: LargestFace = False,
    allow_duplicate: AllowDuplicate = False,
    allow_inconsistent: AllowInconsistent = False,
    allow_low_quality: AllowLowQuality = False,
    allow_not_live: AllowNotLive = False,
    report: Annotated[Path | None, typer.Option(help="Write what became of each photo here (.csv or .ndjson).")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Enrol everybody in a folder or an archive.

    Run again to go on: a photo is enrolled once. Ctrl-C keeps what is done. Exit 1 if a photo was refused."""
    if report is not None and (report.suffix not in REPORTS or not report.parent.is_dir()):
        raise typer.BadParameter(
            f"{report} must be a .csv or .ndjson file in a folder that exists", param_hint="--report"
        )
    options = {
        "face": "largest" if largest_face else "only",
        "allow_duplicate": allow_duplicate,
        "allow_inconsistent": allow_inconsistent,
        "allow_low_quality": allow_low_quality,
        "allow_not_live": allow_not_live,
    }
    if source.is_dir() and not any(entry.is_dir() for entry in source.iterdir()):
        raise typer.BadParameter(
            f"{source} has no folder per person; expected {source}/PERSON/PHOTO", param_hint="SOURCE"
        )
    done = Report()
    try:
        with connect(url, api_key) as kith:
            _make_gallery(kith, gallery)
            _enrol_source(kith, gallery, source, options, _bars(), done)
    finally:
        if report is not None:
            _write(report, done.photos)
    _print(done, as_json)
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)
    if done.refused:
        raise typer.Exit(SAID_NO)


def _enrol_source(
    kith: Kith, gallery: str, source: Path, options: dict[str, Any], progress: Progress, report: Report
) -> None:
    """Send a folder in parts, or an archive as it is, and wait for each; Ctrl-C calls off what is left.

    Raises:
        KithClientError: the server refused a part, or a job failed.
    """
    from service.photo_folders import TarStream, find_photos, parts

    with progress, _said_how_to_go_on():
        bar = progress.add_task("enrolling", total=None, rate="")
        if not source.is_dir():
            _enrol(kith, gallery, source, options, report, progress, bar, str)
            return
        photos, report.ignored = find_photos(source)
        progress.update(bar, total=len(photos))
        for part in parts(photos):
            stream = TarStream(part)
            _enrol(
                kith, gallery, stream, options | {"strip": 0}, report, progress, bar, lambda item: str(source / item)
            )
            for row in report.photos:
                if row["photo"] in stream.unreadable:
                    row |= {"code": "unreadable", "detail": stream.unreadable[row["photo"]]}
                    report.problems.setdefault("unreadable", {"code": "unreadable"})
            if report.interrupted:
                break


@contextmanager
def _said_how_to_go_on() -> Iterator[None]:
    from service.client import KithClientError

    try:
        yield
    except KithClientError as error:
        remedy = f"{error.problem.get('remedy', '')} Then run the same again to go on: a photo is enrolled once."
        error.problem["remedy"] = remedy.lstrip()
        raise


def _enrol(
    kith: Kith,
    gallery: str,
    archive: Path | Archive,
    options: dict[str, Any],
    report: Report,
    progress: Progress,
    bar: TaskID,
    photo: Callable[[str], str],
) -> None:
    """One archive: sent, waited for, and added to the report; ``photo`` of an item is what the report calls it."""
    from service.client import FileStream, KithClientError
    from service.gallery.job_store import ALREADY_ENROLLED, ENROLLED

    before, job = len(report.photos), None
    sent = FileStream(archive) if isinstance(archive, Path) else archive
    sending = progress.add_task("sending", total=sent.size, rate="")

    def show(now: JobOut) -> None:
        rate = "" if now.rate is None else f"{now.rate:.1f} photos/s"
        if isinstance(archive, Path):
            progress.update(bar, total=now.total)
        progress.update(bar, completed=before + now.done, rate=rate)

    try:
        job = kith.enrol_archive(gallery, _Shown(sent, progress, sending), **options)
        progress.remove_task(sending)
        job = kith.wait_for(job.id, seen=show)
    except KeyboardInterrupt:
        report.interrupted = True
        if job is None:
            return
        kith.cancel_job(job.id)
        try:
            job = kith.wait_for(job.id, CANCEL_S)
        except TimeoutError:
            report.jobs.append(job.id)
            remark(f"job {job.id} is still being cancelled: 'kith jobs watch {job.id}' waits for it")
            return
    if job.state == "failed" and job.problem is not None:
        raise KithClientError(job.problem.status, job.problem.model_dump(exclude_none=True))
    report.interrupted = report.interrupted or job.state == "cancelled"
    report.jobs.append(job.id)
    report.enrolled += job.counts.get(ENROLLED, 0)
    report.already_enrolled += job.counts.get(ALREADY_ENROLLED, 0)
    report.ignored += int(job.details.get("ignored", 0))
    for item in kith.job_items(job.id):
        row = {"photo": photo(item.item), "status": "done", "code": "", "detail": ""}
        if item.problem is not None:
            row |= {"status": "refused", "code": item.problem.code, "detail": item.problem.detail}
            report.problems.setdefault(item.problem.code, item.problem.model_dump())
        report.photos.append(row)


class _Shown:
    """An archive whose bar moves as it is sent; from the start, when it is sent again."""

    def __init__(self, archive: Archive, progress: Progress, bar: TaskID) -> None:
        self._archive, self._progress, self._bar = archive, progress, bar
        self.size = archive.size

    def __iter__(self) -> Iterator[bytes]:
        self._progress.update(self._bar, completed=0)
        for piece in self._archive:
            yield piece
            self._progress.advance(self._bar, len(piece))


def _make_gallery(kith: Kith, name: str) -> None:
    from service.client import KithClientError

    try:
        kith.gallery(name)
    except KithClientError as error:
        if error.code != "gallery_not_found":
            raise
        kith.create_gallery(name)


def _bars() -> Progress:
    return progress(_Count(), TextColumn("{task.fields[rate]}"))


class _Count(MofNCompleteColumn):
    """Photos; while an archive is sent, bytes."""

    def render(self, task: Task) -> Text:
        return DownloadColumn().render(task) if task.description == "sending" else super().render(task)


def _write(path: Path, photos: list[dict[str, str]]) -> None:
    """For its owner alone: files and folders are named after people."""
    text = io.StringIO(newline="")
    if path.suffix == ".csv":
        table = csv.DictWriter(text, COLUMNS)
        table.writeheader()
        table.writerows(photos)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in photos)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        refused = [
            {key: row[key] for key in ("photo", "code", "detail")} | {"remedy": remedy_of(report.problems[row["code"]])}
            for row in report.refused
        ]
        counts = {name: getattr(report, name) for name in ("enrolled", "already_enrolled", "ignored", "interrupted")}
        print_json({**counts, "jobs": report.jobs, "refused": refused})
        return
    already = f", {report.already_enrolled} enrolled before" if report.already_enrolled else ""
    ignored = f"; {report.ignored} other files (no photos, or in no person's folder)" if report.ignored else ""
    say(f"{report.enrolled} photos enrolled{already}, {len(report.refused)} refused{ignored}")
    if report.interrupted:
        say("called off: what is done stays, run it again to go on")
    if report.refused:
        table = Table("Photo", "Code", "Detail")
        for row in report.refused:
            table.add_row(*(escape(row[column]) for column in ("photo", "code", "detail")))
        print_table(table)
        refused_for = {row["code"] for row in report.refused}
        for line in remedies_of(problem for code, problem in report.problems.items() if code in refused_for):
            say(line)
