"""Measure how near a key without the scope vectors comes to an enrolled template with 10,000 photos.

The caller identifies photos at the gallery's risk. It knows the recognizer, so that it knows the embedding of each of
its photos; it has no photo of the enrolled person. Attacks: photos of other people; a hill climb over blends of them;
blends that cross the steps of the answers. Each answer bounds the similarity of one known embedding to the template;
the estimate is the unit vector that violates the bounds least. Crops are blended after alignment, which is more than a
caller can do. Prints, and writes bench/results/template_attack.md.

    python -m bench.template_attack [--cache runs/cache]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from bench.common import RESULTS, say, write
from bench.lfw import arguments, lfw_or_exit
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.calibration import Calibration
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.recognition import Recognizer
from service.domain.outcomes import RiskTarget
from service.risk.decision import SIMILARITY_STEP, ImpostorRisk, Thresholds, thresholds_for
from training.evaluation.lfw import embed_lfw, load_lfw_crops, people_of

PHOTOS: Final = 10_000
REPORTED: Final = (100, 1_000, PHOTOS)
VICTIMS: Final = 3
SUBJECTS: Final = 100
RISK: Final = RiskTarget("fpir", 0.01)
BATCH: Final = 50
BEST: Final = 10
"""Photos that blends start from."""

Crops = NDArray[np.uint8]
Policy = Callable[[Float, Thresholds], tuple[Float, Float]]
"""Function from (n,) similarities to the (n,) bounds that the answers give."""


def in_steps(similarities: Float, thresholds: Thresholds) -> tuple[Float, Float]:
    """Answers of Kith: nothing below the review threshold, then steps of the similarity."""
    low = np.floor(similarities / SIMILARITY_STEP) * SIMILARITY_STEP
    edges = np.array([thresholds.review, thresholds.accept])
    reached = np.searchsorted(edges, similarities, side="right")
    low = np.maximum(low, np.array([-1.0, *edges])[reached])
    high = np.minimum(low + SIMILARITY_STEP, np.array([*edges, 1.0])[reached])
    unknown = similarities < thresholds.review
    return np.where(unknown, -1.0, low), np.where(unknown, thresholds.review, high)


def outcome_only(similarities: Float, thresholds: Thresholds) -> tuple[Float, Float]:
    """Answers that name the outcome and no similarity."""
    edges = np.array([-1.0, thresholds.review, thresholds.accept, 1.0])
    reached = np.searchsorted(edges[1:-1], similarities, side="right")
    return edges[reached], edges[reached + 1]


@dataclass
class Attacker:
    """Caller and what it learned: embeddings of its photos, and bounds of their similarities to the template."""

    template: Float
    thresholds: Thresholds
    policy: Policy
    probes: list[Float] = field(default_factory=list)
    low: list[Float] = field(default_factory=list)
    high: list[Float] = field(default_factory=list)
    rows: list[tuple[int, float, float]] = field(default_factory=list)

    def identify(self, probes: Float) -> Float:
        """Send (n, d) probes and return the lower bounds of their similarities."""
        low, high = self.policy(probes @ self.template, self.thresholds)
        for known, new in ((self.probes, probes), (self.low, low), (self.high, high)):
            known.append(new)
        sent = sum(map(len, self.probes))
        if sent in REPORTED:
            self.rows.append((sent, self.best_photo(), float(self.estimate() @ self.template)))
        return low

    def best_photo(self) -> float:
        return float(max((probes @ self.template).max() for probes in self.probes))

    def estimate(self) -> Float:
        """Return the unit vector that violates the bounds least, sought from the mean of the nearest probes."""
        probes, low, high = (np.concatenate(part).astype(np.float64) for part in (self.probes, self.low, self.high))
        near = probes[low >= low.max() - 1e-9].mean(0)

        def violation(vector: Float) -> tuple[float, Float]:
            length = np.linalg.norm(vector)
            unit = vector / length
            reached = probes @ unit
            error = np.minimum(reached - low, 0) + np.maximum(reached - high, 0)
            slope = probes.T @ error
            return float(error @ error) / 2, (slope - (slope @ unit) * unit) / length

        found = minimize(violation, near / np.linalg.norm(near), jac=True, method="L-BFGS-B", options={"maxiter": 500})
        return np.asarray(found.x / np.linalg.norm(found.x))


@dataclass(frozen=True)
class Material:
    """The attacker's photos of people who are not enrolled, and their embeddings."""

    recognizer: Recognizer
    crops: Crops
    vectors: Float


def send_photos(attacker: Attacker, own: Material, rng: np.random.Generator) -> None:
    order = rng.permutation(len(own.vectors))[:PHOTOS]
    for start in range(0, len(order), BATCH):
        attacker.identify(own.vectors[order[start : start + BATCH]])


def climb(attacker: Attacker, own: Material, rng: np.random.Generator) -> None:
    """Blend the best crop with others, and keep what scores at least as high. Half of the photos find the start."""
    order = rng.permutation(len(own.vectors))[: PHOTOS // 2]
    low = np.concatenate(
        [attacker.identify(own.vectors[order[start : start + BATCH]]) for start in range(0, len(order), BATCH)]
    )
    best, reached = own.crops[order[int(low.argmax())]].astype(np.float32), float(low.max())
    for _ in range(PHOTOS // 2 // BATCH):
        weights = rng.uniform(0.05, 0.5, (BATCH, 1, 1, 1)).astype(np.float32)
        others = own.crops[rng.integers(0, len(own.crops), BATCH)].astype(np.float32)
        tried = best * (1 - weights) + others * weights
        low = attacker.identify(own.recognizer.embed(tried.astype(np.uint8)))
        if low.max() >= reached:
            best, reached = tried[int(low.argmax())], float(low.max())


def cross_steps(attacker: Attacker, own: Material, rng: np.random.Generator) -> None:
    """Blend the BEST crops with each other and with all, so that the answers change often. Half find the start."""
    order = rng.permutation(len(own.vectors))[: PHOTOS // 2]
    low = np.concatenate(
        [attacker.identify(own.vectors[order[start : start + BATCH]]) for start in range(0, len(order), BATCH)]
    )
    near = own.crops[order[np.argsort(-low)[:BEST]]].astype(np.float32)
    for _ in range(PHOTOS // 2 // BATCH):
        shares = rng.dirichlet(np.full(BEST, 0.5), BATCH).astype(np.float32)
        mixed = np.tensordot(shares, near, 1)
        weights = rng.uniform(0.0, 0.5, (BATCH, 1, 1, 1)).astype(np.float32)
        others = own.crops[rng.integers(0, len(own.crops), BATCH)].astype(np.float32)
        attacker.identify(own.recognizer.embed((mixed * (1 - weights) + others * weights).astype(np.uint8)))


ATTACKS: Final = {
    "photos of other people": send_photos,
    "hill climb over blends": climb,
    "blends across the steps": cross_steps,
}


def main() -> None:
    given, lfw, pack = arguments().parse_args(), lfw_or_exit(), load_pack(BUNDLED_PACK)
    crops = load_lfw_crops(lfw, pack.detection, given.cache, alignment=pack.recognition.alignment)
    recognizer = Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)
    embedded = embed_lfw(recognizer.embed, crops)
    people = people_of(embedded.files)
    assert pack.calibration is not None  # noqa: S101 - the bundled pack has one
    known = ImpostorRisk(Calibration.from_document(pack.calibration).curve, "pack")
    thresholds = thresholds_for(RISK, known, SUBJECTS)
    rng = np.random.default_rng(11)
    victims = rng.permutation(np.flatnonzero(embedded.found))[:VICTIMS]
    medians = dict[tuple[str, str, int], tuple[float, float]]()
    for name, attack in ATTACKS.items():
        for policy in (in_steps, outcome_only):
            rows = list[list[tuple[int, float, float]]]()
            for victim in victims:
                say(f"{name}, {policy.__name__}, {embedded.files[victim]}")
                mine = np.flatnonzero(embedded.found & (people != people[victim]))
                attacker = Attacker(embedded.vectors[victim], thresholds, policy)
                attack(attacker, Material(recognizer, crops.crops_NHWC[mine], embedded.vectors[mine]), rng)
                rows.append(attacker.rows)
            for each in zip(*rows, strict=True):
                photo, estimate = np.median([row[1:] for row in each], axis=0)
                medians[name, policy.__name__, each[0][0]] = float(photo), float(estimate)
    page = _page(medians, thresholds, _same_person(embedded.vectors[embedded.found], people[embedded.found]))
    write(RESULTS / "template_attack.md", page)
    print(page)


def _same_person(vectors: Float, people: NDArray[np.str_]) -> float:
    """Return the median similarity of two photos of a person."""
    first = {person: row for row, person in reversed(list(enumerate(people)))}
    pairs = [(first[person], row) for row, person in enumerate(people) if first[person] != row]
    a, b = (vectors[list(rows)] for rows in zip(*pairs, strict=True))
    return float(np.median((a * b).sum(1)))


def _page(medians: dict[tuple[str, str, int], tuple[float, float]], thresholds: Thresholds, same_person: float) -> str:
    lines = [
        "# Template attack",
        "",
        f"`python -m bench.template_attack`: medians of {VICTIMS} people of LFW in a gallery of {SUBJECTS} at an FPIR",
        f"of 1 %. Thresholds: {thresholds.review:.3f} (review), {thresholds.accept:.3f}. Two photos of one person",
        f"have a median similarity of {same_person:.2f}.",
        "",
        "| Attack | Answers | Photos | Best photo | Estimate |",
        "|---|---|---:|---:|---:|",
    ]
    words = {"in_steps": f"in steps of {SIMILARITY_STEP}", "outcome_only": "outcomes only (not chosen)"}
    for (attack, policy, photos), (photo, estimate) in medians.items():
        lines.append(f"| {attack} | {words[policy]} | {photos:,} | {photo:.2f} | {estimate:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
