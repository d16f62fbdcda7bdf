"""Master keys, which wrap the data keys of the galleries.

Keys come from the environment or from a file. The first key encrypts new data. The database alone records which key it
uses (service.storage.db.key_vault), so a new key can be distributed to all servers before the first one uses it.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from service.core.atomic_files import atomic_write
from service.core.errors import MasterKeyError
from service.security.sealing import KEY_BYTES, NONCE_BYTES, derived, new_key

ID_DIGITS: Final = 16
FORBIDDEN_MODE: Final = stat.S_IWGRP | stat.S_IRWXO
"""Group read stays allowed: Kubernetes' fsGroup mounts secret files that way."""
LOCK_REMEDY: Final = "Put the key on a local disk (KITH_MASTER_KEY_FILE), or set KITH_MASTER_KEY."
log = logging.getLogger(__name__)


class LocalKey:
    """Key of 32 bytes in this process."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(derived(key, "wrapping"))
        self.id = hashlib.sha256(derived(key, "master key id")).hexdigest()[:ID_DIGITS]

    @classmethod
    def of_text(cls, text: str) -> LocalKey:
        """Parse 32 bytes from base64 or hexadecimal digits. Raises MasterKeyError."""
        stripped = text.strip()
        for read in (bytes.fromhex, lambda given: base64.b64decode(given, validate=True)):
            try:
                key = read(stripped)
            except ValueError:
                continue
            if len(key) == KEY_BYTES:
                return cls(key)
        raise MasterKeyError(
            "a master key is 32 bytes, in base64 or hexadecimal digits: openssl rand -base64 32 makes a new one"
        )

    def wrap(self, key: bytes, purpose: str) -> bytes:
        """Encrypt a data key. ``purpose`` is authenticated with it."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, key, purpose.encode())

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        """Raises MasterKeyError if the wrapped key was altered, or belongs to another key or purpose."""
        try:
            return self._cipher.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise MasterKeyError(f"a key wrapped by master key {self.id} was altered") from error


class GivenKeys:
    """Keys passed as text, from the environment."""

    def __init__(self, text: str, place: str) -> None:
        """Parse one or more keys, separated by spaces or commas. Raises MasterKeyError."""
        self.place = place
        self._keys = {key.id: key for key in _keys(text, place)}

    def first(self) -> LocalKey:
        """Return the key for new data."""
        return next(iter(self._keys.values()))

    def find(self, key_id: str) -> LocalKey | None:
        return self._keys.get(key_id)

    def ids(self) -> list[str]:
        """Return all key ids, the key for new data first."""
        return list(self._keys)


class KeyFile:
    """File with one key per line.

    An unknown key id makes it read the file again, so running servers see new keys. ``may_make``: create the file with
    a new key on first use.
    """

    def __init__(self, path: Path, may_make: bool = False) -> None:
        self.path, self.may_make = path, may_make
        self._keys: dict[str, LocalKey] = {}

    @property
    def place(self) -> str:
        return str(self.path)

    def first(self) -> LocalKey:
        if self.may_make and not self.path.exists():
            with _folder_lock(self.path):
                if not self.path.exists():  # checked again: another process may have created it
                    self._write(self.path, [new_key_text()])
                    log.warning(
                        "created the master key %s. Without it all stored data is lost. Copy it to another machine: "
                        "kith master backup FILE",
                        self.path.absolute(),
                    )
        return self._read()[0]

    def find(self, key_id: str) -> LocalKey | None:
        if key_id not in self._keys and self.path.exists():
            self._keys = {key.id: key for key in self._read()}
        return self._keys.get(key_id)

    def ids(self) -> list[str]:
        return [key.id for key in self._read()] if self.path.exists() or not self.may_make else []

    def add(self) -> LocalKey:
        """Prepend a new key to the file. Raises MasterKeyError."""
        with _folder_lock(self.path):
            lines = self._lines() if self.path.exists() else []
            added = new_key_text()
            self._write(self.path, [added, *lines])
        return LocalKey.of_text(added)

    def back_up(self, copy: Path) -> list[str]:
        """Copy all keys to a new file that only its owner may read, and return their ids.

        Records the ids beside a key file that Kith created. Raises MasterKeyError.
        """
        if copy.exists():
            raise MasterKeyError(f"{copy} exists", "Name a new file, as that one may be the backup of other keys.")
        if copy.absolute().parent.resolve() == self.path.absolute().parent.resolve():
            raise MasterKeyError(f"{copy} is in the folder of the key", "Name a file on another disk or machine.")
        ids = self.ids()
        self._write(copy, self._lines())
        if self.may_make:
            self._write(self._record, ids)
        return ids

    def is_backed_up(self) -> bool:
        """Return whether :meth:`back_up` copied the key for new data. Raises MasterKeyError."""
        try:
            return bool({*self.ids()[:1]} & {*self._record.read_text("ascii").split()})
        except (OSError, UnicodeDecodeError):
            return False

    @property
    def _record(self) -> Path:
        return self.path.with_name(f"{self.path.name}.backed-up")

    def _read(self) -> list[LocalKey]:
        return _keys(self._text(), self.place)

    def _lines(self) -> list[str]:
        _keys(self._text(), self.place)  # raises if the file is damaged, so that it is not overwritten
        return _split(self._text())

    def _text(self) -> str:
        try:
            with self.path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & FORBIDDEN_MODE:
                    raise MasterKeyError(
                        f"other users may read or change {self.path} (mode {mode:o}). Run chmod 600 {self.path}. "
                        "If another user may have read it, make a new key (kith master rotate --new). If they may also "
                        "have a copy of the database, move each gallery into a new one (docs/privacy.md)"
                    )
                return file.read().decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise MasterKeyError(f"the master key cannot be read from {self.path}: {error}") from error

    def _write(self, path: Path, lines: Sequence[str]) -> None:
        """Replace a file. It gets the key file's owner and mode, as an administrator may run this for a service."""
        try:
            with atomic_write(path) as file:
                if self.path.exists():
                    before = self.path.stat()
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                file.write("".join(f"{line}\n" for line in lines).encode("ascii"))
        except OSError as error:
            raise MasterKeyError(f"the master key cannot be written to {path}: {error}") from error


Source = GivenKeys | KeyFile
"""Place that master keys come from. ``place``: its description."""


class MasterKeys:
    """All configured sources. The first one supplies the key for new data."""

    def __init__(self, *sources: Source) -> None:
        self.sources = sources

    def first(self) -> LocalKey:
        """Return the key for new data. Raises MasterKeyError."""
        return self.sources[0].first()

    def of(self, key_id: str) -> LocalKey:
        """Raises MasterKeyError."""
        for source in self.sources:
            if (found := source.find(key_id)) is not None:
                return found
        here = " and ".join(f"{', '.join(source.ids()) or 'none'} ({source.place})" for source in self.sources)
        raise MasterKeyError(f"the stored data needs master key {key_id}; available: {here}")

    def is_backed_up(self) -> bool | None:
        """Return whether the key for new data was backed up; None: Kith did not create it. Raises MasterKeyError."""
        source = self.sources[0]
        return source.is_backed_up() if isinstance(source, KeyFile) and source.may_make else None

    def unwrap(self, wrapped: bytes, purpose: str, by: str) -> bytes:
        """Unwrap with the master key of id ``by``. Raises MasterKeyError."""
        return self.of(by).unwrap(wrapped, purpose)


def new_key_text() -> str:
    return base64.b64encode(new_key()).decode("ascii")


def _keys(text: str, place: str) -> list[LocalKey]:
    """Raises MasterKeyError."""
    lines = _split(text)
    if not lines:
        raise MasterKeyError(f"{place} is empty: it holds no master key")
    try:
        return [LocalKey.of_text(line) for line in lines]
    except MasterKeyError as error:
        raise MasterKeyError(f"{place} holds an invalid or truncated master key: {error.detail}") from error


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text) if word]


@contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the folder. The file itself cannot be locked, since each write replaces it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems lock no folders
        raise MasterKeyError(f"{path.parent} cannot be opened and locked: {error}", LOCK_REMEDY) from error
    try:
        yield
    finally:
        os.close(folder)
