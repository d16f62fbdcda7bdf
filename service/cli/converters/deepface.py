"""Reader of DeepFace's databases: a folder of photos with a pickle of their paths and embeddings.

The pickle is ``ds_model_....pkl`` or ``representations_MODEL.pkl`` (serengil/deepface, modules/recognition.py).
A pickle is a program. This reader runs it without access to any function, so it can only build lists, dictionaries,
strings and numbers. DeepFace aligns faces by the eyes alone, so its embeddings cannot be compared with Kith's, even
those of the same network. The reader takes the photos.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, Final, Self

from models.vision.photo_files import is_hidden, is_photo, read_head
from service.cli.converters.output import PersonPhoto, SubjectIds
from service.core.errors import ForeignFileError

NUMPY_MODULES: Final = (
    "numpy",
    "numpy.core.multiarray",
    "numpy._core.multiarray",
    "numpy.core.numeric",
    "numpy._core.numeric",
)
MAX_PICKLE_BYTES: Final = 2_000_000_000
# Exceptions that unpickling of arbitrary bytes may raise.
UNPICKLING_ERRORS: Final = (
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


class _Placeholder:
    """Replacement for numpy's numbers and arrays. It discards its arguments."""

    def __new__(cls, *_: Any) -> Self:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a placeholder for names of numpy. Raises ForeignFileError for any other name."""
        if module in NUMPY_MODULES:
            return _Placeholder
        raise ForeignFileError(f"the pickle calls {module}.{name}, which DeepFace never does: it may be hostile")

    def persistent_load(self, pid: Any) -> Any:
        raise ForeignFileError("the pickle refers to an external object, which DeepFace never does")


def read_paths(path: Path) -> list[str]:
    """Return each photo path in the pickle once, as DeepFace wrote it.

    Raises:
        ForeignFileError: the file is not a DeepFace pickle, or calls a function.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise ForeignFileError(f"{path.name} is larger than {MAX_PICKLE_BYTES:,} bytes")
    try:
        found = _RestrictedUnpickler(io.BytesIO(path.read_bytes())).load()
    except UNPICKLING_ERRORS as error:
        raise ForeignFileError(f"{path.name} is not a pickle: {error}") from error
    if not isinstance(found, list):
        raise ForeignFileError(f"{path.name} is not a list of representations")
    return list(dict.fromkeys(_photo_path(entry, path.name) for entry in found))


def find_photos(paths: Sequence[str], folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the photos below ``folder`` as relative paths by original path, and the paths without a photo.

    The folder may have been elsewhere when DeepFace wrote the paths. Photos outside the folder are ignored.
    """
    root = folder.resolve()
    found: dict[str, Path] = {}
    missing: list[str] = []
    for path in paths:
        parts = [part for part in PureWindowsPath(path).parts if part not in ("..", ".", "/", "\\")]
        tails = (Path(*parts[start:]) for start in range(len(parts)))
        relative = next((tail for tail in tails if _is_photo_below(root, tail)), None)
        if relative is None:
            missing.append(path)
        else:
            found[path] = relative
    return found, missing


def read_photos(found: dict[str, Path], folder: Path, ids: SubjectIds) -> Iterator[PersonPhoto]:
    """Yield photos one at a time. The first folder, or else the file name, names the person."""
    for source, relative in found.items():
        person = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        yield PersonPhoto(ids.id_for(person), source, (folder / relative).read_bytes())


def _photo_path(entry: Any, file: str) -> str:
    """Return the path in a representation: a dictionary, or a list [path, embedding] in earlier versions."""
    path = entry.get("identity") if type(entry) is dict else entry[0] if type(entry) is list and entry else None
    if type(path) is not str or not path:
        raise ForeignFileError(f"{file}: an entry has no photo path")
    return path


def _is_photo_below(root: Path, tail: Path) -> bool:
    """Tell whether a photo exists at ``root / tail``. Links that lead out of ``root`` do not count."""
    if tail.is_absolute() or is_hidden(tail):
        return False
    try:
        path = (root / tail).resolve()
        return path.is_relative_to(root) and path.is_file() and is_photo(tail, lambda: read_head(path))
    except (OSError, ValueError):
        return False
