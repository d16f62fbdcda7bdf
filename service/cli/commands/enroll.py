"""``kith enroll``: enrollment of a folder or an archive."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from models.vision.photo_files import is_photo, list_photos, printable_path, read_head, visible_subfolders
from service.cli.commands.risk import misses_text
from service.cli.connection import connect
from service.cli.options import EnrollmentOptions, ServerOptions, check_file
from service.cli.terminal import (
    EXIT_INTERRUPTED,
    UNREADABLE,
    count_of,
    print_first,
    print_line,
    print_note,
    print_refused,
    progress_bar,
)
from service.core.atomic_files import atomic_write

if TYPE_CHECKING:
    from kith import Archive, Kith
    from kith.wire.jobs import JobOut

CANCEL_TIMEOUT_S: Final = 30.0
REPORT_COLUMNS: Final = ("photo", "status", "code", "detail")


@dataclass
class EnrollmentReport:
    """Result of an enrollment.

    Attributes:
        ignored: number of files that are not photos, hidden ones included.
        photos: one row of REPORT_COLUMNS and ``remedy`` per file that is not hidden; ``status`` is "done", "refused" or
            "ignored".
        people: ids of those with a refused photo.
        without_photo: ids of those who have no template in the gallery.
    """

    enrolled: int = 0
    already_enrolled: int = 0
    ignored: int = 0
    interrupted: bool = False
    jobs: list[str] = field(default_factory=list)
    photos: list[dict[str, str]] = field(default_factory=list)
    people: set[str] = field(default_factory=set)
    without_photo: list[str] = field(default_factory=list)

    def rows(self, status: str) -> list[dict[str, str]]:
        return [row for row in self.photos if row["status"] == status]

    def add(self, photo: str, status: str, detail: str = "", code: str = "", remedy: str = "") -> None:
        """Add a row."""
        self.photos.append({"photo": photo, "status": status, "code": code, "detail": detail, "remedy": remedy})


def enroll(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder with a folder of photos per person; or a zip, tar, tar.gz, tar.zst.",
            exists=True,
        ),
    ],
    gallery: Annotated[str, typer.Option("--gallery", "-g", help="Gallery, created if missing.")],
    enrollment: EnrollmentOptions,
    server: ServerOptions,
    names: Annotated[
        str | None,
        typer.Option(metavar="ENCODING", help="Encoding of the archive's names if it does not state one, such as gbk."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the result of each photo to this .csv or .ndjson file.")
    ] = None,
) -> None:
    """Enroll everyone in a folder or an archive.

    Run the command again to resume: each photo is enrolled once. Ctrl-C keeps what is done. Exit status 1 if a photo
    is refused."""
    check_file(report, "--report", ".csv", ".ndjson")
    if source.is_dir() and not visible_subfolders(source):
        raise typer.BadParameter(
            f"{source} has no folder per person. Expected {source}/PERSON/PHOTO.", param_hint="SOURCE"
        )
    if source.is_file() and is_photo(source, lambda: read_head(source)):
        raise typer.BadParameter(
            f"{source} is a photo. Enroll one person with 'kith subject enroll ID {source} -g {gallery}'.",
            param_hint="SOURCE",
        )
    result, options = EnrollmentReport(), {**enrollment.fields(), "names": names}
    try:
        with connect(server, "create") as kith:
            created = create_if_missing(kith, gallery)
            _BulkEnrollment(kith, gallery, options, result).run(source)
            if not result.interrupted:  # else others of a person's photos were not tried yet
                result.without_photo = _without_photo(kith, gallery, result.people)
    finally:
        if report is not None:
            _write_report(report, result.photos)
    refused = [{key: text for key, text in row.items() if key != "status"} for row in result.rows("refused")]
    document = {
        "enrolled_count": result.enrolled,
        "already_enrolled_count": result.already_enrolled,
        "ignored_count": result.ignored,
        "interrupted": result.interrupted,
        "jobs": result.jobs,
        "without_photo": result.without_photo,
        "refused": refused,
        "ignored_files": [row["photo"] for row in result.rows("ignored")],
    }
    server.answer(document, lambda: print_report(result, created), ok=result.interrupted or not refused)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


class _BulkEnrollment:
    """Enrollment of one source. The result is added to ``report`` as it becomes known."""

    def __init__(self, kith: Kith, gallery: str, options: dict[str, Any], report: EnrollmentReport) -> None:
        self._kith, self._gallery, self._options, self._report = kith, gallery, options, report
        self._progress = progress_bar(MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._task = self._progress.add_task("enrolling", total=None, rate="")
        self._done = 0
        self._folder = ""
        """Prefix of the names of archive members in the report."""

    def run(self, source: Path) -> None:
        """Send an archive as it is, or a folder in parts, and wait for each job. Ctrl-C cancels the running job.

        Raises:
            KithClientError: the server refused a part, or a job failed. Its remedy says how to resume.
        """
        from kith import FileStream, KithClientError

        with self._progress:
            archives = self._parts_of(source) if source.is_dir() else [FileStream(source)]
            try:
                for archive in archives:
                    self._enroll(archive)
                    if self._report.interrupted:
                        break
            except KithClientError as error:
                remedy = (
                    f"{error.problem.get('remedy', '')} Then run the command again to resume: photos are enrolled once."
                )
                error.problem["remedy"] = remedy.lstrip()
                raise

    def _parts_of(self, source: Path) -> Iterable[Archive]:
        """Report the folder's other files, and return archives of its photos."""
        from service.cli.tools.photo_folders import TarStream, photos_of, split

        listed = list_photos(source)
        self._report.ignored = len(listed.ignored) + listed.hidden
        for path, reason in listed.ignored.items():
            self._report.add(printable_path(path), "ignored", reason)
        for path, reason in listed.unreadable.items():
            self._report.add(printable_path(path), "refused", reason, **UNREADABLE)
        photos = photos_of(source, listed)
        self._progress.update(self._task, total=len(photos))
        self._folder, self._options["strip"] = f"{printable_path(source)}/", 0
        return map(TarStream, split(photos))

    def _enroll(self, archive: Archive) -> None:
        """Send one archive, wait for its job, and add the result to the report."""
        from kith import KithClientError

        report, done_before, job = self._report, self._done, None

        def update(state: JobOut) -> None:
            rate = "" if state.rate is None else f"{state.rate:.1f} photos/s"
            if not self._folder:
                self._progress.update(self._task, total=state.total_count)
            self._progress.update(self._task, completed=done_before + state.done_count, rate=rate)

        try:
            stream = ProgressStream(archive, self._progress)
            job = self._kith.enroll_archive(self._gallery, stream, **self._options)
            self._progress.remove_task(stream.task)
            job = self._kith.wait_for(job.id, on_update=update)
        except KeyboardInterrupt:
            report.interrupted = True
            if job is None:
                return
            self._kith.cancel_job(job.id)
            try:
                job = self._kith.wait_for(job.id, CANCEL_TIMEOUT_S)
            except TimeoutError:
                report.jobs.append(job.id)
                print_note(f"Job {job.id} is still being canceled. Wait for it with 'kith jobs watch {job.id}'.")
                return
        self._add_job(job, getattr(archive, "unreadable", {}))
        if job.state == "failed" and job.problem is not None:
            raise KithClientError(job.problem.status, job.problem.model_dump(exclude_none=True))

    def _add_job(self, job: JobOut, unreadable: Mapping[str, str]) -> None:
        """Add the result. ``unreadable``: reason by name of photos that could not be read while they were sent."""
        from service.storage.repositories.jobs import ALREADY_ENROLLED, ENROLLED, IGNORED

        report = self._report
        report.interrupted = report.interrupted or job.state == "canceled"
        report.jobs.append(job.id)
        report.enrolled += job.counts.get(ENROLLED, 0)
        report.already_enrolled += job.counts.get(ALREADY_ENROLLED, 0)
        report.ignored += int(job.details.get("ignored", 0))
        self._done += job.done_count
        for item in self._kith.job_items(job.id):
            name = self._folder + item.item
            if item.subject is not None and item.problem is not None:
                report.people.add(item.subject)
            if item.item in unreadable:
                report.add(name, "refused", unreadable[item.item], **UNREADABLE)
            elif item.problem is not None:
                report.add(name, "refused", item.problem.detail, item.problem.code, item.problem.remedy)
            elif item.outcome == IGNORED:
                report.add(name, "ignored", "not a photo, or not in the manifest")
            else:
                several = item.face_count is not None and item.face_count > 1
                report.add(name, "done", f"the largest of {item.face_count} faces" if several else "")


class ProgressStream:
    """Archive that advances a progress bar of its own as it is sent. The bar restarts when a request is retried."""

    def __init__(self, archive: Archive, progress: Progress) -> None:
        self._archive, self._progress = archive, progress
        self.size = archive.size
        self.task = progress.add_task("sending, MB", total=archive.size / 1e6, rate="")

    def __iter__(self) -> Iterator[bytes]:
        self._progress.update(self.task, completed=0)
        for chunk in self._archive:
            yield chunk
            self._progress.advance(self.task, len(chunk) / 1e6)


def create_if_missing(kith: Kith, name: str) -> str:
    """Return a description of the new gallery; empty if it exists."""
    from kith import KithClientError

    try:
        kith.gallery(name)
        return ""
    except KithClientError as error:
        if error.code != "gallery_not_found":
            raise
        return f"Created gallery {name}.{misses_text(kith, kith.create_gallery(name).risk)}"


def _without_photo(kith: Kith, gallery: str, people: Iterable[str]) -> list[str]:
    """Return who has no template in the gallery, as far as the server answers: the report is printed in any case."""
    from kith import KithClientError

    missing = []
    for person in sorted(people):
        try:
            if kith.subject(gallery, person).template_count == 0:
                missing.append(person)
        except KithClientError as error:
            if error.code != "subject_not_found":
                print_note(f"Whether people are missing from the gallery could not be checked: {error}")
                break
            missing.append(person)
    return missing


def _write_report(path: Path, photos: list[dict[str, str]]) -> None:
    """Write the report, readable by its owner only: files and folders are named after people."""
    text, rows = io.StringIO(newline=""), [{name: photo[name] for name in REPORT_COLUMNS} for photo in photos]
    if path.suffix.lower() == ".csv":
        table = csv.DictWriter(text, REPORT_COLUMNS)
        table.writeheader()
        table.writerows(rows)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def print_report(report: EnrollmentReport, created: str = "") -> None:
    """Print the result. ``created`` describes a new gallery."""
    if report.without_photo:
        people = "1 person has" if len(report.without_photo) == 1 else f"{len(report.without_photo):,} people have"
        print_line(f"{people} no photo in the gallery, and cannot be found: {', '.join(report.without_photo)}")
    refused = report.rows("refused")
    rest = ". List all with --report FILE."
    print_first("Ignored", [row["photo"] for row in report.rows("ignored")], rest)
    print_refused(refused, rest)
    already = f", {report.already_enrolled} already enrolled" if report.already_enrolled else ""
    ignored = f"; {count_of(report.ignored, 'file')} ignored (hidden, or not a photo)" if report.ignored else ""
    print_line(f"{count_of(report.enrolled, 'photo')} enrolled{already}, {len(refused)} refused{ignored}")
    if several := sum(bool(row["detail"]) for row in report.rows("done")):
        print_line(f"{count_of(several, 'photo')} with several faces: the clearly largest face is enrolled")
    if report.interrupted:
        print_line("Canceled. Enrolled photos stay enrolled. Run the command again to resume.")
    if created:
        print_line(created)
