"""What becomes of the names, tags and metadata of two subjects who are one person. Pure."""

from __future__ import annotations

from typing import Final

from service.errors import InvalidRequestError
from service.gallery.sealed_rows import About

MOST: Final = 100
"""Tags of a subject, and entries of its metadata."""


def merged(kept: About, gone: About) -> About:
    """``kept``, with what it lacks of ``gone``: the name, if it has none, tags, and metadata of other keys. Where both
    say something of one key, ``kept`` is right.

    Raises:
        InvalidRequestError: together it is more than a subject may have.
    """
    metadata = {**gone.metadata, **kept.metadata}
    tags = list(dict.fromkeys([*kept.tags, *gone.tags]))
    for what, count in (("tags", len(tags)), ("entries of metadata", len(metadata))):
        if count > MOST:
            raise InvalidRequestError(
                f"into: together they have {count} {what}, of {MOST} at most: take some away first"
            )
    return About(kept.id, kept.name if kept.name is not None else gone.name, metadata, tags)
