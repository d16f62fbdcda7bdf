"""Compare requested with measured FPIR, through the service's own store, index, risk and decision.

Follows LFW's open-set protocol: 610 people are enrolled and their other photos are mated probes. The 4,069 people with
a single photo are the strangers. Also draws random sub-galleries of 50 to 400 people, with 1 to 3 templates per person.

Thresholds come from the pack's calibration alone, from the gallery's subjects alone, and from both, which is what the
service does; a fixed cosine of 0.4 is the comparison. The largest gallery is also enrolled and searched over HTTP,
which must give the same decisions. Prints, and writes bench/results/open_set.md, .json and .png.

    python -m bench.open_set [--draws 20] [--seed 1000] [--cache runs/cache]
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.common import RESULTS, say, write
from bench.lfw import arguments, lfw_or_exit, packs_beside_reference
from kith import Kith
from models.pack.loading import load_pack
from models.pack.manifest import ModelPack
from models.pack.writing import replace_calibration
from models.risk.calibration import Calibration, fmr_for_fpir
from models.risk.gallery_risk import GalleryRisk
from models.risk.impostor_evidence import RIVAL_WEIGHT, rival_adjusted
from models.runtime.network import Float
from service.domain.gallery import Gallery, GallerySettings, NewTemplate, SubjectFilter
from service.index.follower import Followers
from service.index.replicas import in_process
from service.server import embedded
from service.services.gallery_risks import GalleryRisks
from service.settings import load_settings
from service.storage.repositories.store import Store
from tests.databases import open_database
from training.evaluation.embedding import Embedder
from training.evaluation.lfw import people_of, read_open_set, read_pairs
from training.evaluation.metrics import Ints
from training.export.calibrate import calibrate

FPIR: Final = (0.1, 0.01, 0.001)
SIZES: Final = (50, 100, 200, 400, 610)
TEMPLATES: Final = (1, 2, 3)
FIXED: Final = 0.4
"""Fixed threshold of InsightFace's own server, for any gallery."""
SOURCES: Final = ("pack", "gallery", "both")
SPREAD: Final = (0.1, 0.5, 0.9)
MEDIAN: Final = (0.8, 1.25)
INTERVAL: Final = (0.5, 2.0)
LARGEST_LOSS: Final = 0.01
RAW: Final = ("pack", "fixed")
"""Sources whose thresholds are for similarities that are not adjusted by the runner-up."""
ROUNDING: Final = 0.0005
BATCH: Final = 1000
TRIAL: Final = {(50, 0.1): 1.09, (100, 0.1): 0.96, (200, 0.1): 0.97, (400, 0.1): 1.02, (610, 0.1): 1.06} | {
    (50, 0.01): 2.22,
    (100, 0.01): 1.18,
    (200, 0.01): 1.00,
    (400, 0.01): 1.09,
    (610, 0.01): 1.23,
}
"""Medians of the trial before the design: the gallery's pairs alone, reference recognizer, one template."""


@dataclass(frozen=True, eq=False)
class People:
    """People of the protocol. ``photos``: for each of the 610 a (k, d) of their vectors, the enrolled one first,
    without photos that show no face; ``strangers`` (s, d)."""

    photos: list[Float]
    strangers: Float


@dataclass(frozen=True)
class Outcome:
    """One gallery, one requested FPIR, thresholds from one source."""

    size: int
    templates: int
    fpir: float
    source: str
    threshold: float
    measured_fpir: float
    fnir: float
    hindsight_fnir: float

    @property
    def ratio(self) -> float:
        return self.measured_fpir / self.fpir


def main() -> None:
    parser = arguments()
    parser.add_argument("--draws", type=int, default=20, help="sub-galleries of each size")
    parser.add_argument("--seed", type=int, default=1000, help="of the first draw; settings were found on 0 to 19")
    options = parser.parse_args()
    lfw = lfw_or_exit()
    with tempfile.TemporaryDirectory() as folder:
        packs = packs_beside_reference(
            lambda reference: calibrated(reference, lfw, options.cache, Path(folder) / "reference")
        )
        found: dict[str, list[Outcome]] = {}
        for name, pack in packs.items():
            people = people_of_protocol(pack, lfw, options.cache)
            found[name] = measure(pack, people, options.draws, options.seed)
            differing = over_http(pack, people, Path(folder) / f"http-{name}")
            say(f"{name}: over HTTP {differing} decisions of the largest gallery differ")
            if differing:
                sys.exit("the service over HTTP decides otherwise than its parts do")
    text = "\n\n".join(tables(name, outcomes) for name, outcomes in found.items())
    page = f"# Risk asked and risk kept\n\n`make bench-open-set`\n\n{NOTES}\n{text}\n"
    figures = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in found.items()}
    write(RESULTS / "open_set.md", page, figures, indent=None)
    draw(found, RESULTS / "open_set.png")
    print(text)


def calibrated(reference: Path, lfw: Path, cache: Path, copy: Path) -> ModelPack:
    """Return the reference models, calibrated on the people of LFW View 1's training list outside the protocol."""
    shutil.copytree(reference, copy)
    pack = load_pack(copy)
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    protocol = read_open_set(lfw / "openset_protocol.json")
    searched = set(people_of((*protocol.gallery, *protocol.strangers)))
    files = sorted(file for file in {*pairs.first, *pairs.second} if file.split("/")[0] not in searched)
    embedder = Embedder(pack, cache_dir=cache)
    vectors, seen = embedder.embed([lfw / "images" / file for file in files])
    embedder.save_cache()
    people = [file.split("/")[0] for file, kept in zip(files, seen, strict=True) if kept]
    document = calibrate(vectors[seen], people, "LFW View 1, pairsDevTrain, without the people of the protocol")
    return replace_calibration(pack, {**document, "recognizer": pack.recognition.fingerprint()})


def people_of_protocol(pack: ModelPack, lfw: Path, cache: Path) -> People:
    protocol = read_open_set(lfw / "openset_protocol.json")
    embedder = Embedder(pack, cache_dir=cache)
    found = embedder.embeddings([*protocol.gallery, *protocol.mated, *protocol.strangers], lfw / "images")
    embedder.save_cache()
    photos: dict[str, list[Float]] = defaultdict(list)
    enrolled = people_of(protocol.gallery)
    names = people_of((*protocol.gallery, *protocol.mated))
    for name, vector, seen in zip(names, found.vectors, found.found, strict=False):
        if seen:
            photos[name].append(vector)
    strangers = found.vectors[len(names) :][found.found[len(names) :]]
    return People([np.stack(photos[name]) for name in enrolled if len(photos[name]) > max(TEMPLATES)], strangers)


def measure(pack: ModelPack, people: People, draws: int, seed: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for templates in TEMPLATES:
        for size in SIZES:
            everybody = size >= len(people.photos)
            # The promise covers one template per person; for more templates, half the draws are enough.
            for draw_number in range(1 if everybody else draws if templates == 1 else max(1, draws // 2)):
                rng = np.random.default_rng((seed + draw_number, size, templates))
                chosen = rng.choice(len(people.photos), min(size, len(people.photos)), replace=False)
                outcomes += judge_gallery(pack, people, np.sort(chosen), templates, size)
            say(f"{pack.model_id}: {size} people, {templates} templates")
    return outcomes


def judge_gallery(pack: ModelPack, people: People, chosen: Ints, templates: int, size: int) -> list[Outcome]:
    """Enroll, derive the risk, search for all probes, and compare requested with measured FPIR."""
    with service(pack) as (store, followers, risks):
        gallery = enroll(store, pack, {int(i): people.photos[i][:templates] for i in chosen})
        stored = risks.refresh(gallery.name)
        gallery = store.galleries.get(gallery.name)
        calibration, known = risks.calibration(gallery), risks.of(gallery)
        assert calibration is not None and known is not None and known.search is not None  # noqa: S101
        curves = {
            "pack": calibration.curve,
            "gallery": GalleryRisk(stored.scores, None).curve,
            "both": known.search.curve,
        }
        rival = known.rival_of(len(chosen))
        raw_stranger, best_stranger, _ = search(followers, gallery, people.strangers, rival)
        mated = np.concatenate([people.photos[i][templates:] for i in chosen])
        raw, best, who = search(followers, gallery, mated, rival)
        subjects = {s.id: s.pk for s in store.subjects.list_page(gallery, None, len(chosen), SubjectFilter())}
    mates = np.repeat(chosen, [len(people.photos[i]) - templates for i in chosen])
    own = who == np.array([subjects[f"{mate:04d}"] for mate in mates])
    outcomes = []
    for fpir in FPIR:
        hindsight = float(np.quantile(raw_stranger, 1 - fpir))
        missed = 1 - float((own & (raw >= hindsight)).mean())
        thresholds = {
            source: curve.threshold_at_fmr(fmr_for_fpir(fpir, len(chosen))).similarity
            for source, curve in curves.items()
        }
        for source, threshold in {**thresholds, "fixed": FIXED}.items():
            strangers, enrolled = (raw_stranger, raw) if source in RAW else (best_stranger, best)
            alarms = float((strangers >= threshold).mean())
            fnir = 1 - float((own & (enrolled >= threshold)).mean())
            outcomes.append(Outcome(size, templates, fpir, source, threshold, alarms, fnir, missed))
    return outcomes


@contextmanager
def service(pack: ModelPack) -> Iterator[tuple[Store, Followers, GalleryRisks]]:
    """Yield the parts of service.app that process vectors."""
    assert pack.calibration is not None  # noqa: S101 - every pack here has one
    with tempfile.TemporaryDirectory() as folder:
        store = Store(open_database(f"sqlite:///{Path(folder) / 'kith.db'}"))
        risks = GalleryRisks(store, {pack.recognition.fingerprint(): Calibration.from_document(pack.calibration)})
        yield store, Followers(in_process(store)), risks
        risks.close()
        store.close()


def enroll(store: Store, pack: ModelPack, photos: Mapping[int, Float]) -> Gallery:
    created = store.galleries.create(
        "people", pack.recognition.fingerprint(), photos[next(iter(photos))].shape[1], GallerySettings()
    )
    for number, vectors in photos.items():
        new = [NewTemplate(uuid.uuid4().hex, vector, "embedding") for vector in vectors]
        store.templates.enroll(created, f"{number:04d}", new, None)
    return store.galleries.get(created.name)


def search(
    followers: Followers, gallery: Gallery, probes: Float, rival: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], Ints]:
    """Return (q,) each probe's highest similarity, the same adjusted by the runner-up, and the key of that subject."""
    found, _ = followers.of(gallery).search(probes, 2)
    similarities = [[hit.similarity for hit in hits] for hits in found]
    adjusted = [rival_adjusted(ones, rival)[0] for ones in similarities]
    return np.array([ones[0] for ones in similarities]), np.array(adjusted), np.array([h[0].subject_pk for h in found])


def over_http(pack: ModelPack, people: People, folder: Path) -> int:
    """Search the largest gallery through a real server, at 1 %; count strangers whose decision contradicts the
    threshold."""
    settings = load_settings(
        data_dir=folder,
        pack=pack.directory,
        log_level="WARNING",
        database_url=None,
        api_key=None,
        max_embeddings=BATCH,
        embedding_rate=1e9,
    )
    differing = 0
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("people", risk={"fpir": 0.01})
        for i, photos in enumerate(people.photos):
            kith.enroll("people", f"{i:04d}", embeddings=[photos[0]], allow_duplicate=True)
        threshold = kith.calibrate("people", 0.01).threshold
        usual = kith.identify("people", embeddings=[people.strangers[0]], top_k=2).results[0]
        assert usual.threshold is not None and usual.runner_up is not None  # noqa: S101
        rival = usual.runner_up.similarity - (usual.threshold - threshold) / RIVAL_WEIGHT
        gallery = np.stack([photos[0] for photos in people.photos])
        for start in range(0, len(people.strangers), BATCH):
            probes = people.strangers[start : start + BATCH]
            nearest = np.sort(probes @ gallery.T, axis=1)[:, :-3:-1]
            results = kith.identify("people", embeddings=list(probes), top_k=1).results
            for result, (best, second) in zip(results, nearest.tolist(), strict=True):
                assert result.similarity is not None and result.threshold is not None  # noqa: S101 - an admin's answer
                alarmed = result.similarity >= result.threshold
                score = best - RIVAL_WEIGHT * (second - rival)
                differing += alarmed != (score >= threshold) and abs(score - threshold) > ROUNDING
    return differing


def tables(name: str, outcomes: list[Outcome]) -> str:
    """Format the ratios of each source, then FNIR, then the promise."""
    lines = [
        f"## {name}",
        "",
        "| Templates | People | Asked FPIR | Pack alone | Gallery alone | Both | FPIR at 0.4 | FNIR | Hindsight's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for templates, size, fpir in itertools.product(TEMPLATES, SIZES, FPIR):
        by_source = grouped(outcomes, templates, size, fpir)
        ratios = [spread([o.ratio for o in by_source[source]]) for source in SOURCES]
        fixed = np.median([o.measured_fpir for o in by_source["fixed"]])
        fnir, hindsight = (
            np.median([getattr(o, what) for o in by_source["both"]]) for what in ("fnir", "hindsight_fnir")
        )
        lines.append(
            f"| {templates} | {size} | {fpir:.1%} | {' | '.join(ratios)} | {fixed:.1%} | {fnir:.1%} | {hindsight:.1%} |"
        )
    return "\n".join([*lines, "", *promise(outcomes)])


def promise(outcomes: list[Outcome]) -> list[str]:
    """Format the design's promise for one template per person, and the result."""
    kept: dict[str, list[str]] = defaultdict(list)
    for size, fpir in itertools.product(SIZES, (0.1, 0.01)):
        both = grouped(outcomes, 1, size, fpir)["both"]
        low, median, high = np.quantile([o.ratio for o in both], SPREAD)
        loss = float(np.median([o.fnir - o.hindsight_fnir for o in both]))
        where = f"{size} people at {fpir:.0%}"
        if size >= 100 and not MEDIAN[0] <= median <= MEDIAN[1]:
            kept["median"].append(f"{where}: {median:.2f}")
        if size >= 200 and not (INTERVAL[0] <= low and high <= INTERVAL[1]):
            kept["interval"].append(f"{where}: {low:.2f} to {high:.2f}")
        if loss > LARGEST_LOSS:
            kept["loss"].append(f"{where}: {loss:+.1%}")
    goals = {
        "median": "median of measured / asked within 0.8 to 1.25 at 10 % and 1 % for 100 people or more",
        "interval": "80 % interval within 0.5 to 2 for 200 or more",
        "loss": "FNIR within 1 point of hindsight's",
    }
    return [f"- {text}: {'missed: ' + '; '.join(kept[goal]) if kept[goal] else 'kept'}" for goal, text in goals.items()]


def grouped(outcomes: list[Outcome], templates: int, size: int, fpir: float) -> dict[str, list[Outcome]]:
    found = defaultdict(list)
    for outcome in outcomes:
        if (outcome.templates, outcome.size, outcome.fpir) == (templates, size, fpir):
            found[outcome.source].append(outcome)
    return found


def spread(ratios: list[float]) -> str:
    low, median, high = np.quantile(ratios, SPREAD)
    return f"{median:.2f}" if len(ratios) == 1 else f"{median:.2f} ({low:.2f}-{high:.2f})"


def draw(found: dict[str, list[Outcome]], path: Path) -> None:
    """Plot measured over requested FPIR by gallery size, one template per person."""
    figure = Figure(figsize=(9, 3.4 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 2, sharex=True, sharey="row", squeeze=False)
    for (name, outcomes), row in zip(found.items(), panels, strict=True):
        for axes, fpir in zip(row, (0.1, 0.01), strict=True):
            axes.axhspan(*MEDIAN, color="tab:green", alpha=0.12)
            for shift, source in enumerate(SOURCES):
                ratios = [[o.ratio for o in grouped(outcomes, 1, size, fpir)[source]] for size in SIZES]
                low, median, high = np.quantile([np.resize(r, len(ratios[0])) for r in ratios], SPREAD, axis=1)
                at = np.arange(len(SIZES)) + 0.15 * (shift - 1)
                axes.errorbar(at, median, (median - low, high - median), fmt="o", capsize=3, label=source)
            trial = [TRIAL[size, fpir] for size in SIZES]
            if name == "reference":
                axes.plot(np.arange(len(SIZES)), trial, "x", color="gray", label="trial (gallery's pairs)")
            axes.set_xticks(np.arange(len(SIZES)), [str(size) for size in SIZES])
            axes.set(yscale="log", title=f"{name} recognizer, FPIR {fpir:.0%} asked", ylim=(0.1, 10))
            axes.grid(alpha=0.3)
        row[0].set_ylabel("measured / asked FPIR")
        row[0].legend(fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("people enrolled")
    figure.savefig(path, dpi=130)


NOTES: Final = """Each cell of pack, gallery and both is measured over requested FPIR: the median of the draws and the
range of the middle 80 %. At 1 the promise is kept. All 610 people form one gallery, which has no range. "FPIR at 0.4"
is for a fixed cosine. FNIR (rank 1) is for both; the hindsight value uses a threshold set on these strangers. An FPIR
of 0.1 % is four of the 4,069 strangers; five strangers are mislabeled. Draws share people and strangers.

The reference recognizer is calibrated on people of LFW View 1's training list outside the protocol. The bundled pack's
own calibration uses the whole list, which includes 361 of the 610 people and 1,187 of the strangers. This favors only
the bundled pack. All photos here come from LFW; tests/models/risk/test_gallery_risk.py shows how the gallery's own
evidence corrects the risk for other photos.
"""


if __name__ == "__main__":
    main()
