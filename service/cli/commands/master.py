"""``kith master``: sources, backup and rotation of the master key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import local_database, local_settings
from service.cli.options import CommandGroup, OutputOptions
from service.cli.terminal import make_table
from service.core.errors import SettingsError

if TYPE_CHECKING:
    from service.security.master_keys import KeyFile, MasterKeys

app = CommandGroup(help="Manage the master key, which encrypts the database.", no_args_is_help=True)


@app.command()
def show(output: OutputOptions) -> None:
    """Show the master keys and the number of galleries that each one wraps."""
    from service.storage.privacy.master_key_rotation import Use, uses

    with local_database() as database:
        with database.read() as connection:
            used = uses(connection)
        places = {key: source.place for source in database.vault.master.sources for key in source.ids()}
    rows = [
        {"id": key, "place": places.get(key), "in_use": key == next(iter(used)), **vars(used.get(key, Use()))}
        for key in {**used, **places}
    ]
    cells = ((row["id"], row["place"] or "missing", row["in_use"], row["galleries"]) for row in rows)
    output.answer(rows, make_table("Key", "Source", "In use", "Galleries", rows=cells))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="New file, on another disk or machine.")], output: OutputOptions
) -> None:
    """Copy the master keys to a file that only you may read.

    Keep it apart from the database's backups. To restore the keys, copy it back, or set KITH_MASTER_KEY_FILE."""
    from service.resources import master_keys

    ids = _key_file(master_keys(local_settings())).back_up(file)
    output.answer({"file": str(file), "ids": ids}, f"Wrote {file}: {', '.join(ids)}")


@app.command()
def rotate(
    output: OutputOptions,
    make: Annotated[bool, typer.Option("--new", help="Add a new key to the key file first.")] = False,
) -> None:
    """Wrap every gallery's key with the first master key. Stop the servers first.

    The previous key is kept for backups."""
    from service.storage.privacy.master_key_rotation import Use, rewrap

    with local_database() as database:
        master = database.vault.master
        wrapper = _key_file(master).add() if make else master.first()
        done = rewrap(database, wrapper)
    said = f"now wraps the keys of {done.galleries} more galleries" if done != Use() else "already wraps everything"
    output.answer({"id": wrapper.id, "gallery_count": done.galleries}, f"Master key {wrapper.id} {said}")


def _key_file(master: MasterKeys) -> KeyFile:
    """Return the key file among the sources. Raises SettingsError if there is none."""
    from service.security.master_keys import KeyFile

    for source in master.sources:
        if isinstance(source, KeyFile):
            return source
    raise SettingsError(
        "the master key does not come from a file: back it up or create a new one at its source (docs/privacy.md)"
    )
