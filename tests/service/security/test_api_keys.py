"""API key tokens and stored key records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from kith.wire.keys import KeyIn
from service.security.api_keys import ApiKey, Keyring, Rights, digest, new_token

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECRET = b"s" * 32


def key(**given: object) -> tuple[ApiKey, str]:
    key_id, token = new_token()
    fields = {"expires_at": None, "revoked_at": None} | given
    rights = Rights(frozenset({"read"}), frozenset({"a"}))
    return ApiKey(key_id, digest(token, SECRET), "k", rights, NOW, **fields), token  # type: ignore[arg-type]


def test_a_keyring_accepts_only_its_tokens() -> None:
    (one, token), (two, other) = key(), key()
    ring = Keyring(SECRET, [one, two])
    assert (ring.known(token), ring.known(other)) == (one, two)
    assert len(token) == len("kith_") + 12 + 1 + 64
    head, tail = token.rsplit("_", 1)
    swapped = f"kith_{one.id}_{other.rsplit('_', 1)[1]}"
    for wrong in ("", "kith", "kith_", "kith__", token[:-1], token + "0", f"{head}_", tail, token.upper(), swapped):
        assert ring.known(wrong) is None, wrong
    assert Keyring(b"t" * 32, [one]).known(token) is None
    assert Keyring(SECRET, []).known(f"kith_{'0' * 12}_{'0' * 64}") is None
    assert token not in repr(one) and str(SECRET) not in repr(ring)
    assert tail not in one.digest


def test_ended_keys_stay_ended() -> None:
    ends = NOW + timedelta(days=30)
    assert key()[0].state(NOW) == "active"
    limited, _ = key(expires_at=ends)
    assert limited.state(ends - timedelta(microseconds=1)) == "active"
    assert limited.state(ends) == "expired"
    assert key(revoked_at=NOW, expires_at=ends)[0].state(NOW) == "revoked"
    rotated, _ = key(revoked_at=NOW + timedelta(days=1), expires_at=ends)
    assert [rotated.state(NOW + timedelta(days=days)) for days in (0, 1)] == ["active", "revoked"]
    assert limited.next_expiry(NOW + timedelta(days=20)) == NOW + timedelta(days=50)
    assert key()[0].next_expiry(NOW) is None


def test_a_time_that_no_database_can_store_is_refused() -> None:
    with pytest.raises(ValidationError):
        KeyIn.model_validate({"name": "k", "scopes": ["read"], "expires_at": "9999-12-31T23:59:59-14:00"})
