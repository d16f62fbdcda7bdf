"""Keys without the scope vectors send photos at the gallery's risk and get coarse answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError, Risk
from kith.wire.common import Scope
from models.runtime.network import Float
from service.risk.threshold import SIMILARITY_STEP, Thresholds
from tests.conftest import jpeg
from tests.service.api.conftest import KEY, Guarded

STAFF = "trusted-staff"
NUMBERS = ("similarity", "runner_up", "margin", "false_alarm_probability", "false_match_probability")
SAME_RISK: Risk = {"fpir": 0.001}
OTHER_RISKS: tuple[Risk, ...] = ({"threshold": -1.0}, {"fmr": 0.9}, {"fpir": 0.0001})


@dataclass(frozen=True)
class House:
    """Server whose gallery has the subjects ``ada``, a vector, and ``actor``, a photo."""

    guarded: Guarded
    admin: Kith
    template: Float
    photo: bytes

    def key(self, *scopes: Scope) -> Kith:
        return Kith(self.guarded.url, self.guarded.token(*scopes), attempts=1)


@pytest.fixture(scope="module")
def house(guarded: Guarded, actor: NDArray[np.uint8]) -> Iterator[House]:
    with Kith(guarded.url, KEY) as admin:
        template = np.eye(1, admin.model().dimension, dtype=np.float32)[0]
        admin.create_gallery(STAFF, risk=SAME_RISK)
        admin.enroll(STAFF, "ada", embeddings=[template])
        admin.enroll(STAFF, "actor", jpeg(actor))
        yield House(guarded, admin, template, jpeg(actor))
        admin.delete_gallery(STAFF)


def test_embeddings_and_other_risks_need_the_scope_vectors(house: House) -> None:
    def calls(key: Kith) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "embeddings", partial(key.identify, STAFF, embeddings=[house.template])
        yield "embeddings", partial(key.verify, house.template, (STAFF, "ada"))
        yield "embeddings", partial(key.enroll, STAFF, "ada", embeddings=[house.template])
        for risk in OTHER_RISKS:
            yield "risks other than the gallery's", partial(key.identify, STAFF, house.photo, risk=risk)
            yield "risks other than the gallery's", partial(key.verify, house.photo, (STAFF, "actor"), risk=risk)

    with house.key("identify", "enroll") as key, house.key("identify", "enroll", "vectors") as trusted:
        for (what, call), (_, allowed) in zip(calls(key), calls(trusted), strict=True):
            with pytest.raises(KithClientError, match=f"{what} need the scope 'vectors'") as refused:
                call()
            assert (refused.value.status, refused.value.problem["scope"]) == (403, "vectors")
            allowed()
        assert key.identify(STAFF, house.photo, risk=SAME_RISK).results[0].subject == "actor"
        assert key.verify(house.photo, house.photo, risk=OTHER_RISKS[0]).outcome == "same"
    assert "forbidden" in [line.outcome for line in house.admin.audit(event="access_refused")]


def test_a_photo_gets_a_similarity_in_steps_and_a_stranger_none(house: House, astronaut: NDArray[np.uint8]) -> None:
    (exact,) = house.admin.identify(STAFF, house.photo).results
    with house.key("identify") as key:
        (coarse,) = key.identify(STAFF, house.photo).results
        verified = key.verify(house.photo, (STAFF, "actor"))
        (unknown,) = key.identify(STAFF, jpeg(astronaut), top_k=9).results
        different = key.verify(jpeg(astronaut), (STAFF, "ada"))
        # Embeddings without a subject need no trust.
        assert key.verify(house.template, house.template).similarity == pytest.approx(1, abs=1e-4)
        assert key.embed(house.photo).images[0].faces[0].embedding is not None
    assert (coarse.outcome, coarse.subject) == (exact.outcome, exact.subject) == ("identified", "actor")
    for similarity in (coarse.similarity, verified.similarity):
        assert similarity is not None and exact.similarity is not None and similarity <= exact.similarity
        assert similarity / SIMILARITY_STEP == pytest.approx(round(similarity / SIMILARITY_STEP))
    assert coarse.false_alarm_probability is not None
    assert coarse.false_alarm_probability >= (exact.false_alarm_probability or 0)
    assert (unknown.outcome, unknown.candidates, different.outcome) == ("unknown", [], "different")
    assert not {name for name in NUMBERS if getattr(unknown, name, None) is not None}
    assert (different.similarity, different.false_match_probability) == (None, None)
    text = httpx.get(f"{house.guarded.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    sums = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("kith_similarity_sum")]
    assert any(sums)
    assert all(total / SIMILARITY_STEP == pytest.approx(round(total / SIMILARITY_STEP)) for total in sums)


@pytest.mark.parametrize("scopes", [("enroll",), ("enroll", "read"), ("enroll", "vectors")])
def test_a_rejected_photo_reveals_a_similarity_to_trusted_keys(
    house: House, scopes: tuple[Scope, ...], astronaut: NDArray[np.uint8]
) -> None:
    before = sum(line.details["count"] for line in house.admin.audit(STAFF, event="enrollment_refused"))
    with house.key(*scopes) as key:
        with pytest.raises(KithClientError) as inconsistent:
            key.enroll(STAFF, "actor", jpeg(astronaut), allow_duplicate=True)
        with pytest.raises(KithClientError) as duplicate:
            key.enroll(STAFF, "eve", house.photo)
    assert (inconsistent.value.code, duplicate.value.code) == ("inconsistent_template", "duplicate_subject")
    for refused in (inconsistent.value, duplicate.value):
        assert bool({"similarity", "threshold"} & refused.problem.keys()) == ("vectors" in scopes)
    assert duplicate.value.problem.get("subject") == ("actor" if len(scopes) > 1 else None)
    lines = list(house.admin.audit(STAFF, event="enrollment_refused"))
    assert sum(line.details["count"] for line in lines) == before + 2


def test_coarse_and_exact_similarities_give_the_same_decision() -> None:
    at = Thresholds(accept=0.512, review=0.431, source="pack", extrapolated=False)
    given = (-1.0, 0.43, 0.431, 0.49, 0.511, 0.512, 0.99)
    assert [at.coarse(s) for s in given] == [None, None, 0.431, *map(pytest.approx, (0.45, 0.5, 0.512, 0.95))]
