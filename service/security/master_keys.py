"""The master keys, which wrap the galleries' keys: whoever lacks them can read none of them.

They come from the environment, from a file, or stay in a service that wraps for us (service.security.key_command). Of
several, the first is meant for what is new; which one a database uses is said by the database alone
(service.storage.db.key_vault), so that a key can be handed out to every server before the first uses it.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from service.core.atomic_files import atomic_write
from service.core.errors import MasterKeyError
from service.security.sealing import KEY_BYTES, NONCE_BYTES, derived, new_key

ID_DIGITS: Final = 16
MOST_FILE_BYTES: Final = 65_536
UNWANTED_MODE: Final = stat.S_IWGRP | stat.S_IRWXO
"""A group may read: so are files given to containers that run as some user (Kubernetes' fsGroup)."""


class Wrapper(Protocol):
    """What wraps keys: a key of our own, or a service that holds one."""

    @property
    def id(self) -> str:
        """Names the key; tells nothing of it. At most 64 characters."""

    def wrap(self, key: bytes, purpose: str) -> bytes:
        """Raises MasterKeyError."""

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        """Raises MasterKeyError: it was altered, or is of another key or purpose."""


class Source(Protocol):
    """Where master keys come from. ``place``: in words."""

    @property
    def place(self) -> str: ...

    def first(self) -> Wrapper:
        """The one that is meant for what is new. Raises MasterKeyError."""

    def find(self, key_id: str) -> Wrapper | None:
        """None: it is not here. Raises MasterKeyError."""

    def ids(self) -> Sequence[str]:
        """Of all that are here, the first one first; none where there is nothing yet. Raises MasterKeyError."""


class MasterKeys:
    """All that are at hand. ``sources``: the first one's first key is meant for what is new; they are looked through
    from the last one on, for the first may be a service that is asked for any key."""

    def __init__(self, *sources: Source) -> None:
        self.sources = sources

    def first(self) -> Wrapper:
        """Meant for what is new. Raises MasterKeyError."""
        return self.sources[0].first()

    def of(self, key_id: str) -> Wrapper:
        """Raises MasterKeyError."""
        for source in reversed(self.sources):
            if (found := source.find(key_id)) is not None:
                return found
        here = " and ".join(f"{', '.join(source.ids()) or 'none'} ({source.place})" for source in self.sources)
        raise MasterKeyError(f"what is stored needs master key {key_id}, and there is {here}")

    def unwrap(self, wrapped: bytes, purpose: str, by: str) -> bytes:
        """``by``: the master key's id. Raises MasterKeyError."""
        return self.of(by).unwrap(wrapped, purpose)


class LocalKey:
    """A key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(derived(key, "wrapping"))
        self.id = hashlib.sha256(derived(key, "master key id")).hexdigest()[:ID_DIGITS]

    @classmethod
    def of_text(cls, text: str) -> LocalKey:
        """Of 32 bytes in base64 or hexadecimal digits. Raises MasterKeyError."""
        stripped = text.strip()
        for read in (bytes.fromhex, lambda given: base64.b64decode(given, validate=True)):
            try:
                key = read(stripped)
            except (ValueError, binascii.Error):
                continue
            if len(key) == KEY_BYTES:
                return cls(key)
        raise MasterKeyError(
            "a master key is 32 bytes, in base64 or hexadecimal digits: openssl rand -base64 32 makes a new one"
        )

    def wrap(self, key: bytes, purpose: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, key, purpose.encode())

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        try:
            return self._cipher.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise MasterKeyError(f"a key that master key {self.id} wrapped was altered") from error


class GivenKeys:
    """Keys that somebody else has read."""

    def __init__(self, text: str, place: str) -> None:
        """``text``: one or several, with spaces or commas between. Raises MasterKeyError."""
        self.place = place
        self._keys = {key.id: key for key in _keys(text, place)}

    def first(self) -> LocalKey:
        return next(iter(self._keys.values()))

    def find(self, key_id: str) -> LocalKey | None:
        return self._keys.get(key_id)

    def ids(self) -> list[str]:
        return list(self._keys)


class KeyFile:
    """One key or several, one a line. It is read again when a key is asked for that it did not have: so a server that
    runs meanwhile learns of a new one. ``may_make``: where there is none, the first one asked for is made."""

    def __init__(self, path: Path, may_make: bool = False) -> None:
        self.path, self._may_make = path, may_make
        self._keys: dict[str, LocalKey] = {}

    @property
    def place(self) -> str:
        return str(self.path)

    def first(self) -> LocalKey:
        if self._may_make and not self.path.exists():
            with _alone(self.path):
                if not self.path.exists():  # another process was not faster
                    self._write([new_key_text()])
        return self._read()[0]

    def find(self, key_id: str) -> LocalKey | None:
        if key_id not in self._keys and (self.path.exists() or not self._may_make):
            self._keys = {key.id: key for key in self._read()}
        return self._keys.get(key_id)

    def ids(self) -> list[str]:
        return [key.id for key in self._read()] if self.path.exists() or not self._may_make else []

    def add(self) -> LocalKey:
        """Write a new key in front of the others. Raises MasterKeyError."""
        with _alone(self.path):
            lines = self._lines() if self.path.exists() else []
            added = new_key_text()
            self._write([added, *lines])
        return LocalKey.of_text(added)

    def forget(self, key_id: str) -> None:
        """Raises MasterKeyError: it is not here, or is the only one."""
        with _alone(self.path):
            left = [line for line in self._lines() if LocalKey.of_text(line).id != key_id]
            if len(left) == len(self._lines()):
                raise MasterKeyError(
                    f"there is no master key {key_id} in {self.path}", "'kith master show' names them."
                )
            if not left:
                raise MasterKeyError(
                    f"master key {key_id} is the only one in {self.path}",
                    "'kith master rotate --new' puts another in its place.",
                )
            self._write(left)

    def _read(self) -> list[LocalKey]:
        return _keys(self._text(), self.place)

    def _lines(self) -> list[str]:
        _keys(self._text(), self.place)  # what is damaged is not written anew
        return _split(self._text())

    def _text(self) -> str:
        try:
            with self.path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & UNWANTED_MODE:
                    raise MasterKeyError(
                        f"others than its owner may read or change {self.path} (mode {mode:o}): chmod 600 {self.path}, "
                        "and make a new key if somebody may have read it (kith master rotate --new); if they may have "
                        "had the database, too, move each gallery into a new one (docs/privacy.md)"
                    )
                text = file.read(MOST_FILE_BYTES + 1).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise MasterKeyError(f"the master key cannot be read from {self.path}: {error}") from error
        if len(text) > MOST_FILE_BYTES:
            raise MasterKeyError(f"{self.path} is no file of keys: it has more than {MOST_FILE_BYTES} bytes")
        return text

    def _write(self, lines: Sequence[str]) -> None:
        """Its owner stays who it was, for whoever writes may be another than who serves."""
        try:
            with atomic_write(self.path) as file:
                if self.path.exists():
                    before = self.path.stat()
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                file.write("".join(f"{line}\n" for line in lines).encode("ascii"))
        except OSError as error:
            raise MasterKeyError(f"the master key cannot be written to {self.path}: {error}") from error


def new_key_text() -> str:
    return base64.b64encode(new_key()).decode("ascii")


def _keys(text: str, place: str) -> list[LocalKey]:
    """Raises MasterKeyError."""
    lines = _split(text)
    if not lines:
        raise MasterKeyError(f"there is no master key in {place}: it is empty")
    try:
        return [LocalKey.of_text(line) for line in lines]
    except MasterKeyError as error:
        raise MasterKeyError(f"what is in {place} is no master key, or was cut off: {error.detail}") from error


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text) if word]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Of all processes that would write the file, which is made anew each time and cannot be locked itself."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise MasterKeyError(f"the master key cannot be written to {path}: {error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
