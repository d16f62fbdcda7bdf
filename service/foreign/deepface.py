"""DeepFace's databases: a folder of photos, and what it remembers of them in pickles, ``ds_model_....pkl`` or
``representations_MODEL.pkl`` (serengil/deepface, deepface/modules/recognition.py).

A pickle is a program. This one is run without any way to call something, so that it can build lists, dictionaries,
texts and numbers, and nothing else. Its embeddings are passed over: DeepFace aligns by the eyes alone, so that not even
the same network's vectors compare with Kith's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, Self

from service.archives import is_photo
from service.errors import ForeignFileError
from service.foreign.people_archive import PersonPhoto
from service.foreign.subject_ids import SubjectIds

NUMPY: Final = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
MOST_BYTES: Final = 2_000_000_000
MALFORMED: Final = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What unpickling bytes that were made up may raise."""


class _Nothing:
    """Stands where numpy's numbers and arrays would be made; holds nothing of what it is given."""

    def __new__(cls, *_: Any) -> Self:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Raises ForeignFileError for all but numpy's names, whose places are taken by nothing."""
        if module in NUMPY:
            return _Nothing
        raise ForeignFileError(f"the pickle wants to call {module}.{name}: DeepFace's never do, it may be hostile")

    def persistent_load(self, pid: Any) -> Any:
        raise ForeignFileError("the pickle refers to something outside of it: DeepFace's never do")


def read_paths(path: Path) -> list[str]:
    """Each photo that DeepFace remembers, as it calls it, once.

    Raises:
        ForeignFileError: it is no such pickle, or wants to call something.
        OSError.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ForeignFileError(f"{path.name} is larger than {MOST_BYTES:,} bytes")
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except MALFORMED as error:
        raise ForeignFileError(f"{path.name} is no pickle: {error}") from error
    if not isinstance(found, list):
        raise ForeignFileError(f"{path.name} is no list of representations")
    return list(dict.fromkeys(_path(entry, path.name) for entry in found))


def _path(entry: Any, name: str) -> str:
    """Of a representation: a dictionary in later versions, a list [path, embedding] in earlier ones."""
    said = entry.get("identity") if type(entry) is dict else entry[0] if type(entry) is list and entry else None
    if type(said) is not str or not said:
        raise ForeignFileError(f"{name}: an entry names no photo")
    return said


def find_photos(paths: Sequence[str], folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Where below the folder each photo lies, relative to it, wherever the folder lay when DeepFace saw it; and those
    that are not there. A photo outside of the folder is not looked for."""
    root = folder.resolve()
    found: dict[str, Path] = {}
    missing: list[str] = []
    for said in paths:
        parts = [part for part in PureWindowsPath(said).parts if part not in ("..", ".", "/", "\\")]
        tails = (Path(*parts[start:]) for start in range(len(parts)))
        here = next((tail for tail in tails if _is_below(root, tail)), None)
        if here is None:
            missing.append(said)
        else:
            found[said] = here
    return found, missing


def _is_below(root: Path, tail: Path) -> bool:
    if tail.is_absolute() or not is_photo(PurePosixPath(tail)):
        return False
    try:
        path = (root / tail).resolve()
        return path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError):
        return False


def read_photos(found: dict[str, Path], folder: Path, ids: SubjectIds) -> Iterator[PersonPhoto]:
    """One at a time. Whose a photo is: its first folder says; of one that lies in none, its name."""
    for said, here in found.items():
        person = here.parts[0] if len(here.parts) > 1 else here.stem
        yield PersonPhoto(ids.of(person), said, (folder / here).read_bytes())
