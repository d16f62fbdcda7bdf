"""Measure template recovery: how much of an enrolled template a caller recovers with chosen embeddings, on a real
server.

    python -m bench.template_recovery          # writes bench/results/template_recovery.md; ten minutes

One subject is enrolled. Attackers have a key with one scope, know the recognizer, and send at most 10,000 calls. The
rate limit (KITH_EMBEDDING_RATE) is raised to save time. The reported hours follow from the charged tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, say, write
from kith import Kith, KithClientError
from service.api.http.probe_budget import BURST_S, NEAR_MISS_COST
from service.cli.tools.demo import package_file
from service.security.api_keys import Rights, Scope
from service.server import embedded
from service.settings import Settings, load_settings
from service.storage.repositories.api_keys import KeyStore
from tests.databases import TEXT, open_database

CALLS: Final = 10_000
EXACT_PROBES: Final = 768
PER_CALL: Final = 16
STEPS: Final = (0.05, 0.1, 0.2)
OPERATOR_KEY: Final = "the key of the operator of this bench"
GALLERY: Final = "people"
VICTIM: Final = "victim"
BASE_ABOVE: Final = 0.005
"""Margin of the attacker's first face above the review threshold, which 1 stranger in 100 reaches."""
LEVELS: Final = 2
CELLS: Final = 8
"""Parts into which each level of a search along a path divides the remaining interval. One level or three recover less
for the same number of near misses."""
REPORTED: Final = (25, 100, 200, 400)
"""Numbers of near misses after which a row is printed."""
RATE: Final = float(Settings.model_fields["embedding_rate"].default)

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """``cosine``: of the recovered vector to the template; ``hours``: within the default rate limit."""

    attack: str
    calls: int
    near_misses: int
    cosine: float
    hours: float | None


@dataclass
class Attacker:
    """Client that counts the calls of a key. ``charged``: near misses."""

    kith: Kith
    calls: int = 0
    charged: int = 0

    def identify(self, probe: Vector) -> str:
        self.calls += 1
        (result,) = self.kith.identify(GALLERY, embeddings=[probe]).results
        self.charged += result.outcome == "uncertain"
        return result.outcome

    def enroll(self, probe: Vector) -> str:
        self.calls += 1
        try:
            answer = self.kith.enroll(GALLERY, VICTIM, embeddings=[probe], allow_duplicate=True)
        except KithClientError as refused:
            if set(refused.problem) & {"similarity", "threshold"}:
                raise
            self.charged += 1
            return refused.code
        self.calls += 1  # else the next probes would be compared with it
        self.kith.delete_template(GALLERY, VICTIM, str(answer.results[0].template))
        return "enrolled"

    @property
    def hours(self) -> float:
        tokens = self.calls + self.charged * (NEAR_MISS_COST - 1)
        return max(0.0, tokens - RATE * BURST_S) / RATE / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--output", type=Path, default=RESULTS / "template_recovery.md")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = load_settings(
            data_dir=Path(folder),
            api_key=OPERATOR_KEY,
            master_key=TEXT,
            log_level="WARNING",
            embedding_rate=1e9,
            max_embeddings=PER_CALL,
        )
        with embedded(settings) as url, Kith(url, OPERATOR_KEY) as operator:
            database = open_database(settings.sql_url)
            keys = KeyStore(database)

            def attacker(scope: Scope) -> Attacker:
                return Attacker(Kith(url, keys.create(scope, Rights(frozenset({scope}), None))[1]))

            rows = _measured(operator, attacker, given.calls)
            database.close()
    write(given.output, _page(rows, given.calls))
    print(_page(rows, given.calls))


def _measured(operator: Kith, attacker: Callable[[Scope], Attacker], calls: int) -> list[Row]:
    rng = np.random.default_rng(7)
    photo = package_file("skimage", "data", "astronaut.png").read_bytes()
    seen = operator.embed(photo).images[0].faces[0].embedding
    assert seen is not None  # noqa: S101 - embed gives every face one
    template = _unit(np.asarray(seen, np.float64))
    operator.create_gallery(GALLERY)
    operator.enroll(GALLERY, VICTIM, embeddings=[template])
    probes = np.array([_unit(row) for row in rng.normal(size=(max(calls, EXACT_PROBES), len(template)))])
    return [
        *_with_similarities(operator, probes, template, calls),
        *_with_random_probes(attacker, probes[:calls], template),
        *_along_borders(operator, attacker, template, calls, rng),
    ]


def _with_similarities(operator: Kith, probes: Vector, template: Vector, calls: int) -> list[Row]:
    """Recover the template from similarities that Kith does not reveal."""
    exact = np.array(
        [
            result.similarity
            for start in range(0, EXACT_PROBES, PER_CALL)
            for result in operator.identify(
                GALLERY, embeddings=list(probes[start : start + PER_CALL])[:PER_CALL]
            ).results
        ]
    )
    solved = _solved(probes[:EXACT_PROBES], exact, template)
    rows = [Row("random probes, exact similarities (as before)", EXACT_PROBES // PER_CALL, 0, solved, None)]
    similarities = probes @ template
    for step in STEPS:
        solved = _solved(probes[:calls], ((np.floor(similarities / step) + 0.5) * step)[:calls], template)
        rows.append(Row(f"random probes, similarities in steps of {step} (not chosen)", calls, 0, solved, None))
    return rows


def _with_random_probes(attacker: Callable[[Scope], Attacker], probes: Vector, template: Vector) -> list[Row]:
    """Recover the template from the outcomes of random probes."""
    rows = []
    scopes: tuple[tuple[Scope, str], ...] = (("identify", "unknown"), ("enroll", "inconsistent_template"))
    for scope, far in scopes:
        say(f"{scope}, random probes")
        one = attacker(scope)
        ask = one.identify if scope == "identify" else one.enroll
        cosine = _by_outcome(probes, [ask(probe) for probe in probes], far, template)
        rows.append(Row(f"{scope}: random probes", one.calls, one.charged, cosine, one.hours))
    return rows


def _along_borders(
    operator: Kith, attacker: Callable[[Scope], Attacker], template: Vector, calls: int, rng: np.random.Generator
) -> list[Row]:
    """Recover the template from points of the border between two decisions."""
    (told,) = operator.identify(GALLERY, embeddings=[template]).results
    assert told.threshold is not None and told.review_threshold is not None  # noqa: S101 - it was searched for
    rows = list[Row]()
    review, accept = told.review_threshold, told.threshold
    limit = _inconsistent_below(operator, template)
    for border, threshold, inside in (
        ("identify: unknown or uncertain", review, {"uncertain", "identified"}),
        ("identify: uncertain or identified", accept, {"identified"}),
        ("enroll: refused or enrolled", limit, {"enrolled"}),
    ):
        say(border)
        who = attacker("enroll" if inside == {"enrolled"} else "identify")
        ask = who.enroll if inside == {"enrolled"} else who.identify

        def reaches(probe: Vector, ask: Callable[[Vector], str] = ask, inside: set[str] = inside) -> bool:
            return ask(probe) in inside

        base = _near(template, threshold + BASE_ABOVE, rng)
        search = BorderSearch(who, reaches, threshold, template, "uncertain" not in inside, border)
        rows += search.walk(base, calls, rng)
    return rows


@dataclass(frozen=True)
class BorderSearch:
    """Search for border points on paths in random directions.

    Each path is searched from the side that costs one token, so that a search has one near miss.
    """

    who: Attacker
    reaches: Callable[[Vector], bool]
    threshold: float
    template: Vector
    from_inside: bool
    name: str

    def walk(self, base: Vector, calls: int, rng: np.random.Generator) -> list[Row]:
        equations: list[Vector] = [base]
        values: list[float] = [self.threshold + BASE_ABOVE]
        rows = [Row(f"{self.name}: the face it begins with", 0, 0, float(base @ self.template), None)]
        points = list(REPORTED)

        def add_row() -> None:
            cosine = _solved(np.array(equations), np.array(values), self.template)
            rows.append(Row(self.name, self.who.calls, self.who.charged, cosine, self.who.hours))

        while self.who.calls < calls:
            across = rng.normal(size=len(base))
            across = _unit(across - (across @ base) * base)
            low, high = 0.0, 0.6  # radians: the first is inside, the last outside
            for _ in range(LEVELS):
                edges = np.linspace(low, high, CELLS + 1)
                order = range(1, CELLS) if self.from_inside else range(CELLS - 1, 0, -1)
                for k in order:
                    is_inside = self.reaches(math.cos(edges[k]) * base + math.sin(edges[k]) * across)
                    if is_inside != self.from_inside:
                        low, high = (edges[k - 1], edges[k]) if self.from_inside else (edges[k], edges[k + 1])
                        break
                else:
                    low, high = (edges[-2], edges[-1]) if self.from_inside else (edges[0], edges[1])
            angle = (low + high) / 2
            equations.append(math.cos(angle) * base + math.sin(angle) * across)
            values.append(self.threshold)
            if points and self.who.charged >= points[0]:
                add_row()
                points = [point for point in points if point > self.who.charged]
        add_row()
        return rows


def _inconsistent_below(operator: Kith, template: Vector) -> float:
    """Return the inconsistency threshold, read with the operator's key; an attacker knows the pack."""
    try:
        operator.enroll(GALLERY, VICTIM, embeddings=[-template])
    except KithClientError as refused:
        return float(refused.problem["threshold"])
    raise AssertionError("the opposite of a template was enrolled")


def _solved(probes: Vector, similarities: Vector, template: Vector) -> float:
    """Return the cosine of the lightly regularized least-squares estimate to the template."""
    gram = probes.T @ probes + 1e-6 * np.eye(probes.shape[1])
    return float(_unit(np.linalg.solve(gram, probes.T @ similarities)) @ template)


def _by_outcome(probes: Vector, outcomes: list[str], far: str, template: Vector) -> float:
    """Return the cosine of the template to the mean of the nearer probes, less the mean of the others."""
    near = np.array([outcome != far for outcome in outcomes])
    mean = probes[near].mean(0) - probes[~near].mean(0) if near.any() else -probes.mean(0)
    return float(_unit(mean) @ template)


def _near(template: Vector, similarity: float, rng: np.random.Generator) -> Vector:
    other = rng.normal(size=len(template))
    other = _unit(other - (other @ template) * template)
    return similarity * template + math.sqrt(1 - similarity**2) * other


def _unit(vector: NDArray[np.floating]) -> Vector:
    return np.asarray(vector / np.linalg.norm(vector), np.float64)


def _page(rows: list[Row], calls: int) -> str:
    lines = [
        "# Template recovery",
        "",
        "`python -m bench.template_recovery`: how much of one subject's template a caller recovers with at most",
        f"{calls:,} calls. Attacks along the border between two decisions start with a face just inside, like 1 in 100",
        f"strangers. Hours: duration of the calls within the default rate limit ({RATE:g} tokens a second,",
        f"{NEAR_MISS_COST} tokens per near miss, bursts of {BURST_S} s). The recognizer is the bundled one.",
        "",
        "| Attack | Calls | Near misses | Cosine to the template | Hours |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        hours = "" if row.hours is None else f"{row.hours:.1f}"
        lines.append(f"| {row.attack} | {row.calls:,} | {row.near_misses:,} | {row.cosine:.6f} | {hours} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
