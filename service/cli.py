"""``kith``: serve, or use the service from a terminal, a remote one by ``--url`` or an embedded one."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from models.errors import ModelError
from service.commands import (
    audit,
    bench,
    convert,
    enroll,
    erasures,
    faces,
    galleries,
    jobs,
    keys,
    master,
    operation,
    packs,
    subjects,
    templates,
)
from service.commands.remedies import detail_of, remedy_of
from service.errors import KithError, SettingsError
from service.terminal import FAILED, INTERRUPTED, NOBODY_READS, USAGE, stderr

if TYPE_CHECKING:
    from service.client import KithClientError


USABLE: Final = "See that it is there, and that you may use it; or name another."
FILE_REMEDIES: Final = {
    errno.ENOENT: "See that it, or the folder that it is to be written to, is there: no folder is made.",
    errno.ENOSPC: "Make room, or name another place.",
}


class Commands(TyperGroup):
    """Ends quietly when nobody reads the answer any more."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _end_unread()


app = typer.Typer(
    cls=Commands,
    help="Face recognition that says how sure it may be.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit status: 0 done, and the answer is yes; 1 the answer is no, or something was refused; 2 the command or "
    "a setting is wrong; 3 the service refused or failed; 130 interrupted. More in docs/cli.md.",
)
USE, MANAGE, RUN = "Use it", "Manage", "Run it"
for command in (enroll.enroll, faces.identify, faces.verify, faces.detect, faces.embed):
    app.command(rich_help_panel=USE)(command)
app.add_typer(galleries.app, name="gallery", rich_help_panel=MANAGE)
app.add_typer(subjects.app, name="subject", rich_help_panel=MANAGE)
app.add_typer(templates.app, name="template", rich_help_panel=MANAGE)
app.command(rich_help_panel=MANAGE)(galleries.calibrate)
app.add_typer(convert.app, name="convert", rich_help_panel=MANAGE)
app.add_typer(jobs.app, name="jobs", rich_help_panel=MANAGE)
app.add_typer(keys.app, name="keys", rich_help_panel=MANAGE)
app.add_typer(audit.app, name="audit", rich_help_panel=MANAGE)
app.add_typer(erasures.app, name="erasures", rich_help_panel=MANAGE)
app.command(rich_help_panel=RUN)(operation.demo)
app.command(rich_help_panel=RUN)(operation.serve)
app.command(rich_help_panel=RUN)(operation.doctor)
app.command(rich_help_panel=RUN)(bench.bench)
app.add_typer(packs.app, name="models", rich_help_panel=RUN)
app.add_typer(master.app, name="master", rich_help_panel=RUN)
app.command(rich_help_panel=RUN)(operation.backup)
app.command(rich_help_panel=RUN)(operation.restore)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kith {version('kith-face')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: known errors become two lines on stderr and an exit status, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        try:
            status = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _end_unread()
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except SettingsError as error:
        _tell(error.document(), USAGE, remedy="")  # which its detail says
    except KithError as error:
        _tell(error.document(), FAILED)
    except ModelError as error:
        told = {"detail": str(error)} | vars(error)
        code, remedy = getattr(error, "code", "pack"), getattr(error, "remedy", "")
        _tell(told | {"code": code, "remedy": remedy}, FAILED)
    except OSError as error:
        detail = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        _tell({"code": "file", "detail": detail, "remedy": FILE_REMEDIES.get(error.errno or 0, USABLE)}, FAILED)
    except Exception as error:
        if (refusal := _refusal(error)) is not None:
            _tell(refusal.problem, FAILED)
        if not hasattr(error, "format_message"):
            raise
        _tell_usage(error)
    raise SystemExit(status or 0)


def _refusal(error: Exception) -> KithClientError | None:
    """The client is slow to import, and is there if this comes of it."""
    client = sys.modules.get("service.client")
    return error if client is not None and isinstance(error, client.KithClientError) else None


def _tell_usage(error: Any) -> NoReturn:
    """What Typer found wrong with the line; of a line that is not one yet, it has printed the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise SystemExit(error.exit_code)
    command = getattr(getattr(error, "ctx", None), "command_path", "kith")
    told = {"code": "usage", "detail": error.format_message(), "remedy": f"'{command} --help' says what it takes."}
    _tell(told, error.exit_code)


def _tell(problem: dict[str, Any], status: int, remedy: str | None = None) -> NoReturn:
    """As JSON to who asked for that."""
    code = problem["code"]
    if remedy is None:
        remedy = remedy_of(problem)
    if "--json" in sys.argv:
        import json

        print(json.dumps(problem | {"remedy": remedy}, default=str), file=sys.stderr)
        raise SystemExit(status)
    near = " or ".join(f"'{name}'" for name in problem.get("near", ()))
    what = " ".join(filter(None, (f"Did you mean {near}?" if near else "", remedy)))
    console = stderr()
    console.print(f"[red]error:[/red] {escape(detail_of(problem))} [dim]({code})[/dim]", soft_wrap=True)
    if what:
        console.print(f"  {escape(what)}", soft_wrap=True)
    raise SystemExit(status)


def _end_unread() -> NoReturn:
    """What is still to be written goes nowhere, so that the interpreter does not complain of it either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(NOBODY_READS)


if __name__ == "__main__":
    main()
