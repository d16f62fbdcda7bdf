"""The reference in docs/cli.md, from the commands themselves: ``python -m tests.cli_reference`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from service.cli import app
from tests.conftest import ROOT

DOCUMENT = ROOT / "docs" / "cli.md"
SHARED = ("--url", "--api-key", "--json")
"""What the document tells of once."""
BEGIN, END = "<!-- By tests.cli_reference: -->\n", "<!-- To here. -->\n"


def reference() -> str:
    """Every command with its arguments, options, defaults and environment variables, in the order of ``--help``."""
    return "\n".join(_told(get_command(app), "kith"))


def with_reference(text: str) -> str:
    """The document with its generated part as it should be."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{reference()}\n{END}{rest.partition(END)[2]}"


def _told(command: Any, name: str) -> Iterator[str]:
    if command.hidden:
        return
    if hasattr(command, "commands"):
        for each in command.commands:
            yield from _told(command.commands[each], f"{name} {each}")
        return
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join([name, *(_usage(argument) for argument in arguments)])
    yield f"### {name.removeprefix('kith ')}\n"
    yield f"`{usage}`\n"
    yield " ".join(command.help.split()) + "\n"
    rows = [(f"`{_name(each)}`", each.help or "", "required") for each in arguments if each.required]
    rows += [(f"`{_name(each)}`", each.help or "", _default(each)) for each in arguments if not each.required]
    rows += [(_flags(each), each.help or "", _default(each)) for each in options if each.opts[-1] not in SHARED]
    if rows:
        yield "| | | Default |\n|---|---|---|"
        for cells in rows:
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""
    if shared := [f"`{each.opts[-1]}`" for each in options if each.opts[-1] in SHARED]:
        yield f"Also {', '.join(shared)}.\n"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _usage(argument: Any) -> str:
    shown = f"{_name(argument)}{'...' if argument.nargs == -1 else ''}"
    return shown if argument.required else f"[{shown}]"


def _flags(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: (not name.startswith("--"), name)))


def _default(param: Any) -> str:
    said = "required" if param.required else ""
    if not param.required and param.default not in (None, False, ()):
        said = f"`{param.default}`"
    variable = f" (`{param.envvar}`)" if getattr(param, "envvar", None) else ""
    return f"{said}{variable}".strip()


if __name__ == "__main__":
    DOCUMENT.write_text(with_reference(DOCUMENT.read_text()))
