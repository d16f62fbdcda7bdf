"""Application ``kith``: commands, and translation of errors to messages and exit statuses."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from models.errors import ModelError
from service.cli.calls import add_call
from service.cli.commands import (
    albums,
    audit,
    convert,
    enroll,
    events,
    faces,
    galleries,
    jobs,
    keys,
    master,
    operation,
    packs,
    risk,
    strangers,
    subjects,
    webhooks,
)
from service.cli.options import CommandGroup
from service.cli.terminal import EXIT_BROKEN_PIPE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, detail_for, stderr_console
from service.core.errors import KithError, SettingsError

if TYPE_CHECKING:
    from kith import KithClientError

DEFAULT_FILE_REMEDY: Final = "Check that the file exists and that you may access it, or name another file."
FILE_REMEDIES: Final = {
    errno.ENOENT: "Check the path. The command does not create missing folders.",
    errno.ENOSPC: "Free some disk space, or name another place.",
}
USE, MANAGE, RUN = "Use", "Manage", "Run"


class RootGroup(TyperGroup):
    """Command group that exits without a message when the reader of its output is gone."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _exit_broken_pipe()


app = CommandGroup(
    cls=RootGroup,
    help="Face recognition with a known risk of false matches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit status: 0 success, or the answer is yes; 1 the answer is no, or an item was refused; 2 wrong usage or "
    "settings; 3 the service refused or failed; 130 interrupted. See docs/cli.md.",
)


def _add_commands(panel: str, *commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(rich_help_panel=panel)(command)


_add_commands(USE, enroll.enroll, faces.identify, faces.verify, faces.detect, faces.embed)
app.add_typer(albums.app, name="album", rich_help_panel=MANAGE)
app.add_typer(galleries.app, name="gallery", rich_help_panel=MANAGE)
app.add_typer(subjects.app, name="subject", rich_help_panel=MANAGE)
app.add_typer(subjects.template_app, name="template", rich_help_panel=MANAGE)
app.add_typer(subjects.decoy_app, name="decoy", rich_help_panel=MANAGE)
app.add_typer(strangers.app, name="stranger", rich_help_panel=MANAGE)
add_call(app, "calibrate", "calibrate", risk.print_risk, panel=MANAGE)
app.add_typer(convert.app, name="convert", rich_help_panel=MANAGE)
app.add_typer(jobs.app, name="jobs", rich_help_panel=MANAGE)
app.add_typer(keys.app, name="keys", rich_help_panel=MANAGE)
app.add_typer(audit.app, name="audit", rich_help_panel=MANAGE)
_add_commands(MANAGE, events.events)
app.add_typer(webhooks.app, name="webhook", rich_help_panel=MANAGE)
app.add_typer(audit.erasures_app, name="erasures", rich_help_panel=MANAGE)
_add_commands(RUN, operation.demo, operation.serve, operation.doctor)
app.add_typer(packs.app, name="models", rich_help_panel=RUN)
app.add_typer(master.app, name="master", rich_help_panel=RUN)
_add_commands(RUN, operation.backup, operation.restore)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"kith {version('kith-face')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Known errors become a message on stderr and an exit status, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may hold bytes that are not text
    try:
        try:
            status = app(standalone_mode=False)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _exit_broken_pipe()
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(EXIT_INTERRUPTED) from None
    except SettingsError as error:
        _fail(error.document(), EXIT_USAGE, remedy="")  # the detail names the remedy
    except KithError as error:
        _fail(error.document(), EXIT_FAILED)
    except ModelError as error:
        about = {name: value for name, value in vars(error).items() if not name.startswith("_")}  # Typer adds its own
        _fail({"code": "pack", "detail": str(error)} | about, EXIT_FAILED)
    except OSError as error:
        detail = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        remedy = FILE_REMEDIES.get(error.errno or 0, DEFAULT_FILE_REMEDY)
        _fail({"code": "file", "detail": detail, "remedy": remedy}, EXIT_FAILED)
    except Exception as error:
        if (refused := _as_client_error(error)) is not None:
            _fail(refused.problem, EXIT_FAILED)
        if not hasattr(error, "format_message"):
            raise
        _fail_usage(error)
    raise SystemExit(status or 0)


def _as_client_error(error: Exception) -> KithClientError | None:
    """Return the error if the client raised it. The client is slow to import, so it is imported only if used."""
    errors = sys.modules.get("kith.errors")
    return error if errors is not None and isinstance(error, errors.KithClientError) else None


def _fail_usage(error: Any) -> NoReturn:
    """Report an error that Typer found in the command line."""
    if type(error).__name__ == "NoArgsIsHelpError":  # Typer printed the help
        raise SystemExit(error.exit_code)
    command = getattr(getattr(error, "ctx", None), "command_path", "kith")
    problem = {"code": "usage", "detail": error.format_message(), "remedy": f"See '{command} --help'."}
    _fail(problem, error.exit_code)


def _fail(problem: dict[str, Any], status: int, remedy: str | None = None) -> NoReturn:
    """Print a problem to stderr, as JSON if the command line has --json, and exit."""
    if remedy is None:
        remedy = str(problem.get("remedy") or "")
    if "--json" in sys.argv:
        import json

        print(json.dumps(problem | {"remedy": remedy}, default=str), file=sys.stderr)
        raise SystemExit(status)
    near = " or ".join(f"'{name}'" for name in problem.get("near", ()))
    asked = f"Asked {problem['asked']}." if "asked" in problem else ""
    advice = " ".join(filter(None, (asked, f"Did you mean {near}?" if near else "", remedy)))
    console = stderr_console()
    console.print(f"[red]error:[/red] {escape(detail_for(problem))} [dim]({problem['code']})[/dim]", soft_wrap=True)
    if advice:
        console.print(f"  {escape(advice)}", soft_wrap=True)
    raise SystemExit(status)


def _exit_broken_pipe() -> NoReturn:
    """Exit with the status of SIGPIPE. Unwritten output goes to the null device, or Python would report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(EXIT_BROKEN_PIPE)


if __name__ == "__main__":
    main()
