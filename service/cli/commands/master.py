"""``kith master``: sources and rotation of the master key, also while servers run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from service.cli.connection import local_database, local_settings
from service.cli.options import AsJson, CommandGroup, Yes
from service.cli.terminal import print_json, print_line, print_table, require_confirmation
from service.core.errors import MasterKeyError, SettingsError

if TYPE_CHECKING:
    from service.security.master_keys import KeyFile, MasterKeys, Wrapper

app = CommandGroup(help="Manage the master key, which encrypts the database.", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(help="Master key id, from 'kith master show'.")]


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show the master keys and the number of galleries that each one wraps."""
    from service.storage.privacy.master_key_rotation import Use, uses

    with local_database(local_settings()) as database:
        with database.read() as connection:
            used = uses(connection)
        places = {key: source.place for source in database.vault.master.sources for key in source.ids()}
    rows = [
        {"id": key, "place": places.get(key), "in_use": key == next(iter(used)), **vars(used.get(key, Use()))}
        for key in {**used, **places}
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(Column("Key", no_wrap=True), "Source", "In use", "Galleries")
    for row in rows:
        place = str(row["place"] or "missing, or fetched by its id")
        table.add_row(str(row["id"]), place, "yes" if row["in_use"] else "", str(row["galleries"]))
    print_table(table)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="New file, on another disk or machine.")], as_json: AsJson = False
) -> None:
    """Copy the master keys to a file that only you may read.

    Keep it apart from the database's backups. To restore the keys, copy it back, or set KITH_MASTER_KEY_FILE."""
    from service.builders import master_keys

    ids = _key_file(master_keys(local_settings())).back_up(file)
    print_json({"file": str(file), "ids": ids}) if as_json else print_line(f"Wrote {file}: {', '.join(ids)}")


@app.command()
def new(as_json: AsJson = False) -> None:
    """Add a master key to the key file. 'kith master rotate' starts to use it.

    Copy it to servers with their own key files before you rotate."""
    from service.builders import master_keys

    key = _key_file(master_keys(local_settings(must_exist=False))).add()
    print_json({"id": key.id}) if as_json else print_line(f"Added master key {key.id}")


@app.command()
def rotate(
    make: Annotated[bool, typer.Option("--new", help="Add a new key to the key file first.")] = False,
    to: Annotated[str | None, typer.Option(help="Master key id. Default: the first key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wrap every gallery's key with another master key. The previous key is kept for backups.

    Servers keep running, and read the key file again if they lack the key."""
    if make and to is not None:
        raise typer.BadParameter("Give either --new or --to.", param_hint="--to")
    from service.storage.privacy.master_key_rotation import Use, rewrap

    with local_database(local_settings()) as database:
        master = database.vault.master
        if make:
            wrapper: Wrapper = _key_file(master).add()
        else:
            wrapper = master.first() if to is None else master.of(to)
        rewrapped = rewrap(database, wrapper)
    if as_json:
        print_json({"id": wrapper.id, "galleries": rewrapped.done.galleries, "broken": list(rewrapped.broken)})
        return
    if rewrapped.broken:
        print_line(f"Skipped galleries whose keys cannot be opened: {', '.join(rewrapped.broken)}")
        print_line("Run 'kith gallery check'.")
    if rewrapped.done == Use():
        print_line(f"Master key {wrapper.id} already wraps everything")
    else:
        print_line(f"Master key {wrapper.id} now wraps the keys of {rewrapped.done.galleries} more galleries")


@app.command()
def forget(key: KeyId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete an unused master key from the key file.

    Backups made with it cannot be restored without it. Keep a copy as long as you keep those."""
    if not yes:
        require_confirmation(f"Delete master key {key}? Backups made with it cannot be restored without it.")
    from service.storage.privacy.master_key_rotation import uses

    with local_database(local_settings()) as database:
        with database.read() as connection:
            used = uses(connection)
        if key in used:
            raise MasterKeyError(
                f"master key {key} still wraps {used[key].galleries} galleries' keys: run 'kith master rotate' first, "
                "and delete galleries whose keys cannot be opened"
            )
        _key_file(database.vault.master).forget(key)
    print_json({"id": key}) if as_json else print_line(f"Deleted master key {key}")


def _key_file(master: MasterKeys) -> KeyFile:
    """Return the key file among the sources. Raises SettingsError if there is none."""
    from service.security.master_keys import KeyFile

    for source in master.sources:
        if isinstance(source, KeyFile):
            return source
    raise SettingsError(
        "the master key does not come from a file: back it up or create a new one at its source (docs/privacy.md)"
    )
