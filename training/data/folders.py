"""Photos in folders of a training or evaluation set, told from other files by the rule of the service, and lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.vision.photo_files import list_photos, printable_path
from training.config import ConfigError


@dataclass(frozen=True)
class FolderPhotos:
    """Photos at any depth below a folder.

    Attributes:
        photos: paths, sorted.
        ignored: names of other files, of links to folders, and of photos outside of subfolders where these name people.
        hidden: number of hidden files and folders, and of those that operating systems create.
    """

    photos: tuple[Path, ...]
    ignored: tuple[str, ...] = ()
    hidden: int = 0

    @property
    def warning(self) -> str | None:
        """Sentence that names the first ignored file; None if no file is ignored."""
        if not self.ignored:
            return None
        return f"{len(self.ignored)} files are not used, first {self.ignored[0]}"


def photos_below(root: Path, in_subfolders: bool = False) -> FolderPhotos:
    """List the photos below a folder; with ``in_subfolders``, ignore those directly in ``root``. Raises ConfigError: a
    photo or folder cannot be read."""
    listed = list_photos(root)
    if listed.unreadable:
        path, reason = next(iter(listed.unreadable.items()))
        raise ConfigError(f"{printable_path(path)} cannot be read ({reason}). Restore it or remove it")
    loose = [path for path in listed.photos if in_subfolders and path.parent == root]
    ignored = [f"{printable_path(path)} ({reason})" for path, reason in listed.ignored.items()]
    ignored += [f"{printable_path(path)} (not in a person's folder)" for path in loose]
    photos = tuple(sorted({*listed.photos} - {*loose}))
    return FolderPhotos(photos, tuple(ignored), listed.hidden)


def read_list(path: Path) -> str:
    """Return the text of a list of a benchmark. Raises ConfigError if it is missing or not UTF-8."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}. Convert it to UTF-8") from error
