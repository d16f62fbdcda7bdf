"""What is sealed opens only by its key, and only as what it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.security.sealing import OVERHEAD_BYTES, Seal, SealBrokenError, new_key

SEAL = Seal(new_key())


@given(st.binary(max_size=200))
def test_what_is_sealed_opens(value: bytes) -> None:
    sealed = SEAL.close(value, "name")
    assert SEAL.open(sealed, "name") == value
    assert len(sealed) == len(value) + OVERHEAD_BYTES
    assert sealed != SEAL.close(value, "name"), "the same twice would tell that it is the same"


@given(st.binary(min_size=1, max_size=50), st.data())
def test_a_bit_that_is_another_breaks_the_seal(value: bytes, data: st.DataObject) -> None:
    sealed = bytearray(SEAL.close(value, "name"))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SealBrokenError):
        SEAL.open(bytes(sealed), "name")


@pytest.mark.parametrize("cut", [0, 1, OVERHEAD_BYTES - 1])
def test_too_little_to_be_sealed(cut: int) -> None:
    with pytest.raises(SealBrokenError):
        SEAL.open(SEAL.close(b"value", "name")[:cut], "name")


def test_another_key_or_purpose_does_not_open() -> None:
    sealed = SEAL.close(b"value", "name")
    with pytest.raises(SealBrokenError):
        SEAL.open(sealed, "crop")
    with pytest.raises(SealBrokenError):
        Seal(new_key()).open(sealed, "name")


def test_vectors_come_back_bit_for_bit(rng: np.random.Generator) -> None:
    vectors = rng.normal(size=(20, 7)).astype(np.float32)
    sealed = SEAL.close_vectors(vectors, 3)
    assert {len(one) for one in sealed} == {4 * 7 + OVERHEAD_BYTES} and len(set(sealed)) == 20
    assert np.array_equal(SEAL.open_vectors(sealed, 3, 7), vectors)
    assert SEAL.open_vectors([], 3, 7).shape == (0, 7)
    for generation, dimension in ((2, 7), (3, 8)):
        with pytest.raises(SealBrokenError):
            SEAL.open_vectors(sealed, generation, dimension)


def test_a_pseudonym_is_the_keys_own_and_of_its_kind() -> None:
    named = SEAL.pseudonym("subject", "ada")
    assert named == SEAL.pseudonym("subject", "ada") and len(named) == 32
    others = [
        SEAL.pseudonym("subject", "bob"),
        SEAL.pseudonym("tag", "ada"),
        Seal(new_key()).pseudonym("subject", "ada"),
    ]
    assert named not in others
