"""Attacks by chosen embeddings: what responses reveal, the probe budget and the audit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError, Risk
from kith.wire.verification import SideOut, VerifyOut
from models.runtime.network import Float
from service.api.http.permissions import Caller
from service.api.http.probe_budget import MIN_AUDITED_NEAR_MISSES, NEAR_MISS_COST, ProbeBudget
from service.cli.commands import faces
from service.core.deadlines import Deadline
from service.core.errors import DeadlineExceededError
from service.domain.gallery import Gallery
from service.observability.metrics import Metrics
from service.risk.decision import SIMILARITY_STEP, Thresholds
from service.security.api_keys import Rights, Scope
from service.security.rate_limits import Buckets, Limit
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.audit.writer import AuditWriter
from service.storage.repositories.api_keys import KeyStore
from tests.conftest import jpeg
from tests.databases import open_database

OPERATOR = "an operator's key that is long enough"
STAFF = "staff"
NUMBERS = ("similarity", "runner_up", "margin", "false_alarm_probability", "false_match_probability")


@dataclass(frozen=True)
class House:
    """Server with one subject, ``ada``, and keys by their scopes."""

    url: str
    admin: Kith
    keys: KeyStore
    template: Float

    def key(self, *scopes: Scope) -> Kith:
        return Kith(self.url, self.token(*scopes), attempts=1)

    def token(self, *scopes: Scope) -> str:
        return self.keys.create("k", Rights(frozenset(scopes), None))[1]

    def near(self, similarity: float, seed: int = 0) -> Float:
        """Return a unit vector of this similarity to the template."""
        other = np.random.default_rng(seed).normal(size=self.template.shape)
        other -= (other @ self.template) * self.template
        across = np.sqrt(1 - similarity**2) / np.linalg.norm(other)
        return np.asarray(similarity * self.template + across * other, np.float32)

    def audit(self, event: str) -> list[Any]:
        return list(self.admin.audit(STAFF, event=event))


def opened(settings: Settings) -> Iterator[House]:
    with embedded(settings) as url, Kith(url, OPERATOR) as admin:
        database = open_database(settings.sql_url)
        template = np.random.default_rng(3).normal(size=admin.model().dimension)
        template /= np.linalg.norm(template)
        admin.create_gallery(STAFF, risk={"fpir": 0.001})
        admin.enroll(STAFF, "ada", embeddings=[template])
        yield House(url, admin, KeyStore(database), np.asarray(template, np.float32))
        database.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Server with a large budget."""
    yield from opened(
        load_settings(data_dir=tmp_path_factory.mktemp("kith"), api_key=OPERATOR, log_level="WARNING", rate_limit=None)
    )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[House]:
    """Server whose budget allows one near miss and is not refilled during a test."""
    yield from opened(
        load_settings(
            data_dir=tmp_path, api_key=OPERATOR, log_level="WARNING", embedding_rate=1 / 2000, max_embeddings=1
        )
    )


def code(error: pytest.ExceptionInfo[KithClientError]) -> str:
    return error.value.code


@pytest.mark.parametrize("scopes", [("enroll",), ("enroll", "read"), ("enroll", "identify")])
def test_an_inconsistent_template_is_rejected_without_a_similarity(house: House, scopes: tuple[Scope, ...]) -> None:
    before = sum(line.details["count"] for line in house.audit("enrollment_refused"))
    with house.key(*scopes) as key:
        with pytest.raises(KithClientError) as alone:
            key.enroll(STAFF, "ada", embeddings=[house.near(0.0)])
        both = key.enroll(STAFF, "ada", embeddings=[house.near(0.0), house.near(-0.5)])
    assert code(alone) == "inconsistent_template"
    told = [alone.value.problem, *(result.error.model_dump() for result in both.results if result.error)]
    assert len(told) == 3
    for problem in told:
        assert not {"similarity", "threshold"} & problem.keys()
        assert "templates of" not in problem["detail"], "their number is for keys that read"
    lines = house.audit("enrollment_refused")
    assert sum(line.details["count"] for line in lines) == before + 3
    (about_ada,) = {line.subject for line in lines}
    assert about_ada == next(line.subject for line in house.admin.audit(STAFF, subject="ada"))
    assert {line.outcome for line in lines} == {"inconsistent_template"}


def test_a_caller_that_may_export_gets_exact_similarities(house: House) -> None:
    with pytest.raises(KithClientError) as refused:
        house.admin.enroll(STAFF, "ada", embeddings=[house.near(0.0123)])
    assert refused.value.problem["similarity"] == pytest.approx(0.0123, abs=1e-4)
    (result,) = house.admin.identify(STAFF, embeddings=[house.near(0.0123)]).results
    assert result.similarity == pytest.approx(0.0123, abs=1e-4)


def test_a_duplicate_is_named_without_a_similarity(house: House) -> None:
    for scopes, shown in ((("enroll",), False), (("enroll", "read"), True)):
        with house.key(*scopes) as key, pytest.raises(KithClientError) as refused:
            key.enroll(STAFF, "eve", embeddings=[house.near(0.9721)])
        assert code(refused) == "duplicate_subject"
        assert refused.value.problem.get("subject") == ("ada" if shown else None)
        assert not {"similarity", "threshold"} & refused.value.problem.keys()


def test_a_stored_response_contains_no_similarity(house: House) -> None:
    """Any key that repeats the request gets the stored response."""
    sent: dict[str, Any] = {"embeddings": [house.near(0.97, seed=1), house.near(0.0)], "idempotency_key": "one"}
    first = house.admin.enroll(STAFF, "ada", **sent)
    assert first.results[1].error is not None and "similarity" in first.results[1].error.model_dump()
    with house.key("enroll") as key:
        again = key.enroll(STAFF, "ada", **sent)
    assert again.results[0].template == first.results[0].template
    assert again.results[1].error is not None and "similarity" not in again.results[1].error.model_dump()
    assert first.results[0].template is not None
    house.admin.delete_template(STAFF, "ada", first.results[0].template)


@pytest.mark.parametrize("risk", [None, {"threshold": -1.0}, {"fmr": 0.9}, {"fpir": 0.9}])
def test_a_response_below_the_review_threshold_has_no_numbers(house: House, risk: Risk | None) -> None:
    """A laxer risk in the request reveals neither a number nor a decision."""
    (own,) = house.admin.identify(STAFF, embeddings=[house.near(0.0)]).results
    assert own.review_threshold is not None
    with house.key("identify") as key:
        for similarity in (-0.3, 0.0, own.review_threshold - 0.01):
            probe = house.near(similarity)
            (result,) = key.identify(STAFF, embeddings=[probe], risk=risk, top_k=9).results
            assert (result.outcome, result.candidates) == ("unknown", [])
            assert not {name for name in NUMBERS if getattr(result, name, None) is not None}
            verified = key.verify(probe, (STAFF, "ada"), risk=risk)
            assert verified.outcome == "different" and verified.similarity is None
            assert verified.false_match_probability is None


def test_an_embedding_above_a_threshold_gets_that_threshold_as_similarity(house: House) -> None:
    for similarity in np.linspace(0.5, 0.99, 25):
        probe = house.near(float(similarity))
        (exact,) = house.admin.identify(STAFF, embeddings=[probe]).results
        with house.key("identify") as key:
            (coarse,) = key.identify(STAFF, embeddings=[probe]).results
            verified = key.verify(probe, (STAFF, "ada"))
        assert coarse.outcome == exact.outcome and coarse.threshold == exact.threshold
        reached = {"identified": exact.threshold, "uncertain": exact.review_threshold, "unknown": None}[coarse.outcome]
        assert coarse.similarity == reached
        assert [one.similarity for one in coarse.candidates] == [reached] * (reached is not None)
        assert verified.similarity in (None, verified.threshold, verified.review_threshold)
        for told, chance in (
            (coarse.similarity, coarse.false_alarm_probability),
            (verified.similarity, verified.false_match_probability),
        ):
            assert (told is None) == (chance is None), "of the coarse similarity"
            assert chance is None or chance >= (exact.false_alarm_probability or 0)


def test_an_identified_embedding_reveals_no_other_subject(house: House) -> None:
    house.admin.enroll(STAFF, "own", embeddings=[house.near(0.58)], allow_duplicate=True)
    (exact,) = house.admin.identify(STAFF, embeddings=[house.near(0.58)]).results
    assert exact.runner_up is not None and exact.runner_up.similarity > (exact.review_threshold or 1)
    with house.key("identify") as key:
        (coarse,) = key.identify(STAFF, embeddings=[house.near(0.58)]).results
    assert (coarse.subject, coarse.runner_up, coarse.margin, len(coarse.candidates)) == ("own", None, None, 1)
    house.admin.delete_subject(STAFF, "own")


def test_an_uncertain_embedding_does_not_rank_subjects(house: House) -> None:
    """A caller that enrolled many embeddings would read the similarity of another subject from its rank among them."""
    threshold: Risk = {"threshold": 0.98}  # above the gallery's own, which moves with its evidence
    probe = house.near(0.985, seed=5)
    for n, (subject, similarity) in enumerate((("above", 0.9875), ("below", 0.9825))):
        across = house.near(0.0, seed=n + 7)
        across -= (across @ probe) * probe
        across *= np.sqrt(1 - similarity**2) / np.linalg.norm(across)
        house.admin.enroll(STAFF, subject, embeddings=[similarity * probe + across], allow_duplicate=True)
    (exact,) = house.admin.identify(STAFF, embeddings=[probe], risk=threshold).results
    assert exact.outcome == "uncertain", "three subjects are nearer to each other than the least margin"
    assert [one.subject for one in exact.candidates[:3]] == ["above", "ada", "below"]
    with house.key("identify") as key:
        (coarse,) = key.identify(STAFF, embeddings=[probe], risk=threshold).results
    assert coarse.outcome == "uncertain"
    assert [one.subject for one in coarse.candidates] == ["ada", "above", "below"], "in order of their creation"
    assert coarse.runner_up is not None and coarse.runner_up.subject == "above"
    for subject in ("above", "below"):
        house.admin.delete_subject(STAFF, subject)


def test_the_mean_similarity_of_a_gallery_leaves_out_embeddings(house: House) -> None:
    """A hundred equal templates would reveal their similarity, with four digits in ``z``, without a near miss."""
    probes = [house.near(0.9737)] * 16
    with house.key("identify", "read") as key:
        for _ in range(7):
            assert {result.outcome for result in key.identify(STAFF, embeddings=probes).results} == {"identified"}
        drift = key.gallery(STAFF).drift
    assert drift is not None and drift.mated_similarity is None
    assert drift.window["identified"] >= 100
    for _ in range(7):
        house.admin.identify(STAFF, embeddings=probes)
    known = house.admin.gallery(STAFF).drift
    assert known is not None and known.mated_similarity is not None, "a caller that may export may know it"


def test_photos_reveal_no_more_than_embeddings(house: House, actor: NDArray[np.uint8]) -> None:
    with house.key("identify") as key:
        (result,) = key.identify(STAFF, jpeg(actor)).results
        verified = key.verify(jpeg(actor), (STAFF, "ada"))
    assert (result.outcome, result.similarity, result.candidates) == ("unknown", None, [])
    assert (verified.outcome, verified.similarity) == ("different", None)


def test_comparing_two_subjects_reveals_no_more(house: House) -> None:
    """A caller may have enrolled one subject as a probe."""
    house.admin.enroll(STAFF, "probe", embeddings=[house.near(0.1)])
    with house.key("identify", "enroll") as key:
        assert key.verify((STAFF, "probe"), (STAFF, "ada"), risk={"threshold": -1.0}).similarity is None
    house.admin.delete_subject(STAFF, "probe")


def test_hygiene_needs_the_scope_admin(house: House) -> None:
    """Findings compare templates that the caller may have chosen with those of others."""
    with house.key("read", "enroll", "identify") as key, pytest.raises(KithClientError) as refused:
        key.hygiene(STAFF)
    assert code(refused) == "forbidden"


def test_metrics_contain_no_exact_similarities_of_embeddings(house: House) -> None:
    with house.key("identify", "read") as key:
        key.identify(STAFF, embeddings=[house.near(0.4321)])
        token = {"Authorization": f"Bearer {OPERATOR}"}
        text = httpx.get(f"{house.url}/metrics", headers=token).text
    sums = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("kith_similarity_sum")]
    assert all(total / SIMILARITY_STEP == pytest.approx(round(total / SIMILARITY_STEP)) for total in sums)


def test_a_request_takes_few_embeddings_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KITH_MAX_EMBEDDINGS", "KITH_EMBEDDING_RATE"):
        monkeypatch.delenv(name)
    assert load_settings(data_dir=tmp_path).max_embeddings == 16


def test_an_exhausted_budget_rejects_probes_and_is_audited(guarded: House) -> None:
    """The burst is two tokens; a near miss costs many times as much."""
    token = guarded.token("identify")
    with guarded.key("admin") as another:
        (own,) = another.identify(STAFF, embeddings=[guarded.near(0.0)]).results
    assert own.threshold is not None and own.review_threshold is not None
    border = guarded.near((own.threshold + own.review_threshold) / 2)
    with Kith(guarded.url, token, attempts=1) as caller:
        (first,) = caller.identify(STAFF, embeddings=[border]).results
        assert first.outcome == "uncertain"
        for call in (
            lambda: caller.identify(STAFF, embeddings=[border]),
            lambda: caller.verify(border, (STAFF, "ada")),
            lambda: caller.identify(STAFF, embeddings=[border]),
        ):
            with pytest.raises(KithClientError) as refused:
                call()
            assert (refused.value.status, code(refused)) == (429, "probe_budget")
        answer = httpx.post(
            f"{guarded.url}/v1/galleries/{STAFF}/identify",
            json={"embeddings": [border.tolist()]},
            headers={"Authorization": f"Bearer {token}"},
        )
        assert int(answer.headers["Retry-After"]) > (NEAR_MISS_COST - 2) * 2000
    (line,) = guarded.audit("probed")
    assert (line.outcome, line.details["near_misses"]) == ("exhausted", 1)
    assert "probe_budget" in [line.outcome for line in guarded.admin.audit(event="access_refused")]
    metrics = httpx.get(f"{guarded.url}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"}).text
    assert 'kith_probed_total{reason="exhausted"} 1.0' in metrics


@pytest.mark.parametrize("route", ["verify", "identify", "enroll"])
def test_concurrent_requests_do_not_pass_the_budget_together(guarded: House, route: str) -> None:
    """Each is charged when its outcome is known; the others wait until then."""
    (own,) = guarded.admin.identify(STAFF, embeddings=[guarded.near(0.0)]).results
    assert own.threshold is not None and own.review_threshold is not None
    border = guarded.near((own.threshold + own.review_threshold) / 2).tolist()
    path, body = {
        "verify": ("verify", {"a": {"embedding": border}, "b": {"subject": {"gallery": STAFF, "subject": "ada"}}}),
        "identify": (f"galleries/{STAFF}/identify", {"embeddings": [border], "filter": {}}),
        "enroll": (f"galleries/{STAFF}/subjects/ada/templates", {"embeddings": [guarded.near(0.0).tolist()]}),
    }[route]
    headers = {"Authorization": f"Bearer {guarded.token('identify', 'enroll')}"}

    def ask(_: int) -> str:
        document = httpx.post(f"{guarded.url}/v1/{path}", json=body, headers=headers, timeout=60).json()
        document |= document.get("results", [{}])[0]
        return str(document.get("outcome") or document["code"])

    with ThreadPoolExecutor(16) as threads:
        told = Counter(threads.map(ask, range(32)))
    near_miss = "inconsistent_template" if route == "enroll" else "uncertain"
    assert told == {near_miss: 1, "probe_budget": 31}


def test_a_caller_that_may_export_is_not_charged(guarded: House) -> None:
    """It could read the templates themselves."""
    (own,) = guarded.admin.identify(STAFF, embeddings=[guarded.near(0.0)]).results
    assert own.threshold is not None and own.review_threshold is not None
    border = guarded.near((own.threshold + own.review_threshold) / 2)
    with guarded.key("admin") as key:
        for caller in (guarded.admin, key):
            for _ in range(3):
                assert caller.identify(STAFF, embeddings=[border]).results[0].outcome == "uncertain"
                caller.verify(border, (STAFF, "ada"))
            with pytest.raises(KithClientError) as refused:
                caller.enroll(STAFF, "ada", embeddings=[guarded.near(0.0)])
            assert code(refused) == "inconsistent_template"
    assert not guarded.audit("probed")


def test_embeddings_and_photos_of_one_request_do_not_wait_for_each_other(
    tmp_path: Path, actor: NDArray[np.uint8]
) -> None:
    """After some near misses, the tokens left do not cover what the whole request might cost."""
    settings = load_settings(data_dir=tmp_path, api_key=OPERATOR, log_level="WARNING", deadline_s=20)
    with contextmanager(opened)(settings) as house, house.key("identify") as key:
        (own,) = house.admin.identify(STAFF, embeddings=[house.near(0.0)]).results
        assert own.threshold is not None and own.review_threshold is not None
        border = house.near((own.threshold + own.review_threshold) / 2)
        for _ in range(9):
            assert key.identify(STAFF, embeddings=[border]).results[0].outcome == "uncertain"
        far = [house.near(0.0, seed) for seed in range(16)]
        for _ in range(2):
            results = key.identify(STAFF, jpeg(actor), embeddings=far, risk={"fpir": 0.02}).results
            assert len(results) == 17


def test_a_request_that_waits_for_tokens_ends_at_its_deadline() -> None:
    async def wait() -> None:
        budget = ProbeBudget(1.0, cast(AuditWriter, None), Metrics((), ()))
        caller, gallery = Caller("key", Rights(frozenset({"identify"}), None)), cast(Gallery, object())
        async with budget.taken(caller, gallery, embeddings=12):
            with Deadline(0.1) as deadline, pytest.raises(DeadlineExceededError):
                deadline.begin()
                async with budget.taken(caller, gallery, embeddings=12):
                    pytest.fail("the tokens do not cover both")
        async with budget.taken(caller, gallery, embeddings=12):
            pass

    asyncio.run(wait())


def test_photos_do_not_use_the_budget(guarded: House, actor: NDArray[np.uint8]) -> None:
    with guarded.key("identify") as key:
        for _ in range(4):
            key.identify(STAFF, jpeg(actor))
            key.verify(jpeg(actor), (STAFF, "ada"))


def test_photos_at_a_chosen_risk_have_a_budget(guarded: House, actor: NDArray[np.uint8]) -> None:
    """Bisection over thresholds would measure a similarity exactly."""
    guarded.admin.enroll(STAFF, "tom", actor)
    with guarded.key("identify") as key:
        with pytest.raises(KithClientError) as refused:
            for threshold in (0.99, 0.98, 0.97):
                key.identify(STAFF, actor, risk={"threshold": threshold})
        assert code(refused) == "probe_budget"
        with pytest.raises(KithClientError) as refused:
            key.verify(actor, (STAFF, "tom"), risk={"threshold": 0.99})
        assert code(refused) == "probe_budget"
        assert key.identify(STAFF, actor).results[0].outcome == "identified", "the gallery's own risk stays free"
    assert [line.outcome for line in guarded.audit("probed")] == ["exhausted"]
    for _ in range(5):
        guarded.admin.identify(STAFF, actor, risk={"threshold": 0.99})


def test_many_near_misses_are_audited_once(house: House) -> None:
    with house.key("enroll") as key:
        for _ in range(MIN_AUDITED_NEAR_MISSES):
            with pytest.raises(KithClientError):
                key.enroll(STAFF, "ada", embeddings=[house.near(0.0)])
        actor = next(iter(house.audit("enrollment_refused"))).actor
    lines = [line for line in house.audit("probed") if line.actor == actor]
    assert [line.outcome for line in lines] == ["near_misses"]
    assert lines[0].details == {"probes": MIN_AUDITED_NEAR_MISSES, "near_misses": MIN_AUDITED_NEAR_MISSES}


def test_coarse_and_exact_similarities_give_the_same_decision() -> None:
    at = Thresholds(accept=0.512, review=0.431, source="pack", extrapolated=False)
    given = (-1.0, 0.43, 0.431, 0.49, 0.511, 0.512, 0.99)
    assert [at.coarse(s, photo=False) for s in given] == [None, None, 0.431, 0.431, 0.431, 0.512, 0.512]
    assert [at.coarse(s, photo=True) for s in given] == [
        *(None, None, 0.431, pytest.approx(0.45), pytest.approx(0.5), 0.512, pytest.approx(0.95)),
    ]
    raised = Thresholds(-1, -1, "explicit", False).at_least(0.4)
    assert (raised.accept, raised.review) == (0.4, 0.4)


def test_buckets_take_several_tokens_and_keep_debts() -> None:
    buckets, limit = Buckets(), Limit(rate=1, burst=10)
    assert buckets.take("a", limit, 0, 8).passes
    refused = buckets.take("a", limit, 0, 8)
    assert (refused.passes, refused.next_s, refused.remaining) == (False, 6, 2)
    buckets.charge("a", limit, 0, 50)
    assert buckets.take("a", limit, 0).next_s == 49
    assert buckets.take("a", limit, 49).passes
    assert buckets.take("b", limit, 0, 1000).passes, "a call above the burst passes a full bucket"
    assert buckets.take("b", limit, 0).next_s == 991


def test_the_command_prints_the_bound_of_a_withheld_similarity() -> None:
    answer = VerifyOut(model="m", outcome="different", review_threshold=0.431, a=SideOut(), b=SideOut())
    assert faces._describe_verdict(answer, {"a": "one.jpg", "b": "two.jpg"}).endswith("similarity below 0.431")
