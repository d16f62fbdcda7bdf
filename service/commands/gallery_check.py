"""``kith gallery check``: is what is stored sound?"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from service.commands.completion import complete_galleries
from service.commands.options import AsJson
from service.commands.own_database import own_settings
from service.terminal import SAID_NO, print_json, say


def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[GALLERY]", help="Which gallery; default: all.", autocompletion=complete_galleries),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is the database sound, and do searches answer by it?

    Looks at the database itself (KITH_DATABASE_URL, or the data directory's) and at Milvus if KITH_MILVUS_URI names it,
    also while services run on them. Exit 1 if something is left to do."""
    from service.gallery.check import open_check
    from service.opening import open_milvus, open_own_database
    from service.security.acting import Actor, acting_as
    from service.spool import Spool

    settings = own_settings()
    spool = Spool(settings.data_dir / "spool")
    milvus = partial(open_milvus, settings)
    with (
        acting_as(Actor("operator")),
        open_check(open_own_database(settings), spool.abandoned, settings.index_path, milvus) as checked,
    ):
        findings = list(checked.findings(name, repair))
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        for found in findings:
            where = f"gallery {found.gallery}" if found.gallery else "database"
            state = "repaired" if found.repaired else "--repair mends it" if found.mendable else "to be done by hand"
            say(f"{where}: {found.kind} ({found.count}): {found.what}. {found.action} [{state}]")
        if not findings:
            say("all is well")
    if not all(finding.repaired for finding in findings):
        raise typer.Exit(SAID_NO)
