"""``kith master``: where the master key comes from, and another one in its place, while servers run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from service.commands.options import AsJson, Yes
from service.commands.own_database import own_settings
from service.commands.questions import insist
from service.errors import MasterKeyError, SettingsError
from service.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from service.security.master import KeyFile, MasterKeys, Wrapper

app = typer.Typer(help="The master key, which opens what is stored.", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(help="As 'kith master show' names it.")]


@app.command()
def show(as_json: AsJson = False) -> None:
    """The keys at hand, and what each wraps in the database."""
    from service.gallery.rewrapping import Use, uses
    from service.opening import open_own_database

    settings = own_settings(existing=False)
    with closing(open_own_database(settings)) as database:
        with database.read() as connection:
            used = uses(connection)
        found = {key: source.place for source in database.vault.master.sources for key in source.ids()}
    rows = [
        {
            "id": key,
            "place": found.get(key),
            "in_use": key == next(iter(used)),
            **vars(used.get(key, Use())),
        }
        for key in {**used, **found}
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(Column("Key", no_wrap=True), "Where", "In use", "Galleries")
    for row in rows:
        place = str(row["place"] or "missing, or asked for by its id")
        table.add_row(str(row["id"]), place, "yes" if row["in_use"] else "", str(row["galleries"]))
    print_table(table)


@app.command()
def new(as_json: AsJson = False) -> None:
    """Write a new key to the key file, in front of the others: nothing uses it until 'kith master rotate'. Servers that
    have files of their own are to be given it before."""
    from service.opening import master_keys

    key = _file(master_keys(own_settings(existing=False))).add()
    print_json({"id": key.id}) if as_json else say(f"added master key {key.id}")


@app.command()
def rotate(
    make: Annotated[bool, typer.Option("--new", help="First write a new key to the key file.")] = False,
    to: Annotated[str | None, typer.Option(help="Which key; default: the first one at hand.")] = None,
    as_json: AsJson = False,
) -> None:
    """Have another master key wrap every gallery's key. Servers go on meanwhile; those that do not have the key yet
    read the key file again. The one before is kept, for backups."""
    if make and to is not None:
        raise typer.BadParameter("either --new or --to", param_hint="--to")
    from service.gallery.rewrapping import Use, rewrap
    from service.opening import open_own_database
    from service.security.acting import Actor, acting_as

    settings = own_settings(existing=False)
    with acting_as(Actor("operator")), closing(open_own_database(settings)) as database:
        master = database.vault.master
        if make:
            wrapper: Wrapper = _file(master).add()
        else:
            wrapper = master.first() if to is None else master.of(to)
        rewrapped = rewrap(database, wrapper)
    done = rewrapped.done
    if as_json:
        print_json({"id": wrapper.id, "galleries": done.galleries, "broken": list(rewrapped.broken)})
        return
    if rewrapped.broken:
        say(f"left as they are, for their keys do not open (kith gallery check): {', '.join(rewrapped.broken)}")
    if done == Use():
        say(f"master key {wrapper.id} wraps everything already")
    else:
        say(f"master key {wrapper.id} wraps {done.galleries} galleries' keys that another one wrapped")


@app.command()
def forget(key: KeyId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a key from the key file that wraps nothing any more. Backups from its time cannot be restored without it:
    keep it elsewhere as long as you keep those."""
    if not yes:
        insist(f"Delete master key {key}? Backups from its time cannot be restored without it.")
    from service.gallery.rewrapping import uses
    from service.opening import open_own_database

    settings = own_settings(existing=False)
    with closing(open_own_database(settings)) as database:
        with database.read() as connection:
            used = uses(connection)
        if key in used:
            raise MasterKeyError(
                f"master key {key} still wraps {used[key].galleries} galleries' keys: rotate first (galleries "
                "whose keys do not open are to be deleted)"
            )
        _file(database.vault.master).forget(key)
    print_json({"id": key}) if as_json else say(f"deleted master key {key}")


def _file(master: MasterKeys) -> KeyFile:
    """Raises SettingsError."""
    from service.security.master import KeyFile

    for source in master.sources:
        if isinstance(source, KeyFile):
            return source
    raise SettingsError(
        "the master key comes from no file: make a new one where it comes from, then kith master rotate"
    )
