"""Questions to people, on stderr; who is not there to answer is told what to name instead."""

from __future__ import annotations

import sys

import typer

from service.terminal import SAID_NO, remark, stderr


def insist(question: str) -> None:
    """Before what cannot be undone. Raises typer.Exit: the answer is no; typer.BadParameter: there is none."""
    if not confirmed(question):
        remark("nothing was done")
        raise typer.Exit(SAID_NO)


def confirmed(question: str, unasked: str = "--yes") -> bool:
    """``unasked``: the option that answers yes. Raises typer.BadParameter: nobody answers."""
    stderr().print(f"{question} [y/N]: ", end="", markup=False, soft_wrap=True)
    answer = sys.stdin.readline()
    if not answer:
        stderr().print()
        raise typer.BadParameter("nobody answers here: name it to do it unasked", param_hint=unasked)
    return answer.strip().lower() in ("y", "yes")
