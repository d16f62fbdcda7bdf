"""The master key: from a file, by its id, and refused where it is another."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest

from service.errors import MasterKeyError
from service.security.master import LocalKey, MasterKeys, make_key, read_key
from service.security.sealing import new_key


def test_a_key_that_was_made_is_read_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "master.key"
    make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wrapped = read_key(path).wrap(b"k" * 32, "gallery")
    assert read_key(path).unwrap(wrapped, "gallery") == b"k" * 32
    with pytest.raises(MasterKeyError, match="altered"):
        read_key(path).unwrap(wrapped, "audit")


def test_a_key_in_base64_or_hexadecimal_digits_is_the_same_key() -> None:
    key = new_key()
    assert LocalKey.of_text(key.hex()).id == LocalKey.of_text(f" {base64.b64encode(key).decode()}\n").id


@pytest.mark.parametrize("text", ["", "short", "00" * 31, "00" * 33, "é" * 32, base64.b64encode(b"k" * 31).decode()])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(MasterKeyError, match="32 bytes"):
        LocalKey.of_text(text)


def test_what_an_older_key_wrapped_is_opened_while_that_is_known() -> None:
    old, new = LocalKey(new_key()), LocalKey(new_key())
    wrapped = old.wrap(b"k" * 32, "gallery")
    assert MasterKeys(new, [old]).unwrap(wrapped, "gallery", old.id) == b"k" * 32
    with pytest.raises(MasterKeyError, match=old.id):
        MasterKeys(new).unwrap(wrapped, "gallery", old.id)
