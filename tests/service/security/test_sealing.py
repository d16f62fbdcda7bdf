"""Encrypted values open only with their key and purpose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.security.sealing import OVERHEAD_BYTES, Seal, SealBrokenError, new_key

SEAL = Seal(new_key())


@given(st.binary(max_size=200))
def test_sealed_values_open(value: bytes) -> None:
    sealed = SEAL.close(value, "name")
    assert SEAL.open(sealed, "name") == value
    assert len(sealed) == len(value) + OVERHEAD_BYTES
    assert sealed != SEAL.close(value, "name"), "equal ciphertexts would reveal equal values"


def test_altered_values_and_other_keys_and_purposes_do_not_open() -> None:
    sealed = SEAL.close(b"value", "name")
    altered = sealed[:-1] + bytes([sealed[-1] ^ 1])
    wrong = [(SEAL, value, "name") for value in (b"", sealed[:1], sealed[: OVERHEAD_BYTES - 1], altered)]
    for seal, value, purpose in (*wrong, (SEAL, sealed, "crop"), (Seal(new_key()), sealed, "name")):
        with pytest.raises(SealBrokenError):
            seal.open(value, purpose)


def test_vectors_come_back_bit_for_bit(rng: np.random.Generator) -> None:
    vectors = rng.normal(size=(20, 7)).astype(np.float32)
    sealed = SEAL.close_vectors(vectors, 3)
    assert {len(one) for one in sealed} == {4 * 7 + OVERHEAD_BYTES} and len(set(sealed)) == 20
    assert np.array_equal(SEAL.open_vectors(sealed, 3, 7), vectors)
    assert SEAL.open_vectors([], 3, 7).shape == (0, 7)
    for generation, dimension in ((2, 7), (3, 8)):
        with pytest.raises(SealBrokenError):
            SEAL.open_vectors(sealed, generation, dimension)


def test_pseudonyms_depend_on_key_and_kind() -> None:
    named = SEAL.pseudonym("subject", "ada")
    assert named == SEAL.pseudonym("subject", "ada") and len(named) == 32
    others = [
        SEAL.pseudonym("subject", "bob"),
        SEAL.pseudonym("tag", "ada"),
        Seal(new_key()).pseudonym("subject", "ada"),
    ]
    assert named not in others
