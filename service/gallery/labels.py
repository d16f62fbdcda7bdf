"""What a subject can be filtered by: each tag and each metadata entry as one label. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from service.gallery.sealed_rows import LABEL
from service.security.sealing import Seal


def labels_of(seal: Seal, tags: Iterable[str], metadata: Mapping[str, Any]) -> set[str]:
    """A subject passes a filter if it bears all labels of the filter's tags and metadata. They are keyed hashes: those
    of another gallery, and whoever guesses what they are of, cannot be compared with them.

    Values are equal as JSON values are: 1 and 1.0 are one number, true is none, the order of an object's keys is of no
    meaning.
    """
    said = [["tag", tag] for tag in tags] + [["metadata", key, _canonical(value)] for key, value in metadata.items()]
    return {seal.pseudonym(LABEL, json.dumps(one, sort_keys=True)) for one in said}


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value
