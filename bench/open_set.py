"""Is the asked risk kept? Requested against measured FPIR, through the service's own store, index, risk and decision.

LFW's open-set protocol: 610 people enrolled, their other photos searched for, and the 4,069 people with a single photo
as strangers; and random sub-galleries of 50 to 400 of them, with 1 to 3 templates a person. Thresholds from the pack's
calibration alone, from the gallery's subjects alone, and from both, which is what the service does; beside a fixed
cosine of 0.4. The largest gallery is also enrolled and searched over HTTP, which must decide alike. Prints, and writes
bench/results/open_set.md, .json and .png.

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
from models.gallery_risk import GalleryRisk
from models.network import Float
from models.pack import ModelPack, load_pack, replace_calibration
from models.risk import Calibration, fmr_for_fpir
from service.client import Kith
from service.gallery.follower import Followers
from service.gallery.replicas import in_process
from service.gallery.risks import GalleryRisks
from service.gallery.store import Store
from service.gallery.subjects import Gallery, GallerySettings, NewTemplate, SubjectFilter
from service.server import embedded
from service.settings import load_settings
from tests.databases import open_database
from training.calibrate import calibrate
from training.evaluate import Embedder, people_of, read_open_set, read_pairs
from training.metrics import Ints

FPIR: Final = (0.1, 0.01, 0.001)
SIZES: Final = (50, 100, 200, 400, 610)
TEMPLATES: Final = (1, 2, 3)
FIXED: Final = 0.4
"""What InsightFace's own server takes, whatever the gallery."""
SOURCES: Final = ("pack", "gallery", "both")
SPREAD: Final = (0.1, 0.5, 0.9)
MEDIAN: Final = (0.8, 1.25)
INTERVAL: Final = (0.5, 2.0)
LARGEST_LOSS: Final = 0.01
BATCH: Final = 1000
TRIAL: Final = {(50, 0.1): 1.09, (100, 0.1): 0.96, (200, 0.1): 0.97, (400, 0.1): 1.02, (610, 0.1): 1.06} | {
    (50, 0.01): 2.22,
    (100, 0.01): 1.18,
    (200, 0.01): 1.00,
    (400, 0.01): 1.09,
    (610, 0.01): 1.23,
}
"""Medians of the trial that the design began from: the gallery's pairs alone, reference recogniser, one template."""


@dataclass(frozen=True, eq=False)
class People:
    """Everybody of the protocol: ``photos``: for each of the 610 a (k, d) of their vectors, the enrolled one first, so
    far as they show a face; ``strangers`` (s, d)."""

    photos: list[Float]
    strangers: Float


@dataclass(frozen=True)
class Outcome:
    """One gallery, one asked FPIR, thresholds from one source."""

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
    """The reference models with a calibration of their own: those people of LFW View 1's training list of whom no photo
    is in the protocol."""
    shutil.copytree(reference, copy)
    pack = load_pack(copy)
    pairs = read_pairs(lfw / "pairsDevTrain.txt")
    protocol = read_open_set(lfw / "openset_protocol.json")
    searched = set(people_of((*protocol.gallery, *protocol.strangers)))
    files = sorted(file for file in {*pairs.first, *pairs.second} if file.split("/")[0] not in searched)
    embedder = Embedder(pack, cache_dir=cache)
    vectors, seen = embedder.embed([lfw / "images" / file for file in files])
    embedder.remember()
    people = [file.split("/")[0] for file, kept in zip(files, seen, strict=True) if kept]
    document = calibrate(vectors[seen], people, "LFW View 1, pairsDevTrain, nobody of the protocol")
    return replace_calibration(pack, {**document, "recogniser": pack.recognition.fingerprint()})


def people_of_protocol(pack: ModelPack, lfw: Path, cache: Path) -> People:
    protocol = read_open_set(lfw / "openset_protocol.json")
    embedder = Embedder(pack, cache_dir=cache)
    found = embedder.embeddings([*protocol.gallery, *protocol.mated, *protocol.strangers], lfw / "images")
    embedder.remember()
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
            # One template a person is what is promised; of more, half the draws tell enough.
            for draw_number in range(1 if everybody else draws if templates == 1 else max(1, draws // 2)):
                rng = np.random.default_rng((seed + draw_number, size, templates))
                chosen = rng.choice(len(people.photos), min(size, len(people.photos)), replace=False)
                outcomes += judge_gallery(pack, people, np.sort(chosen), templates, size)
            say(f"{pack.model_id}: {size} people, {templates} templates")
    return outcomes


def judge_gallery(pack: ModelPack, people: People, chosen: Ints, templates: int, size: int) -> list[Outcome]:
    """Enrol, derive the risk, search for everybody, and compare the asked FPIR with what came of it."""
    with service(pack) as (store, followers, risks):
        gallery = enrol(store, pack, {int(i): people.photos[i][:templates] for i in chosen})
        stored = risks.refresh(gallery.name)
        gallery = store.gallery(gallery.name)
        calibration, known = risks.calibration(gallery), risks.of(gallery)
        assert calibration is not None and known is not None and known.source == "both"  # noqa: S101
        curves = {
            "pack": calibration.curve,
            "gallery": GalleryRisk(stored.scores, None).curve,
            "both": known.curve,
        }
        best_stranger, _ = search(followers, gallery, people.strangers)
        best, who = search(followers, gallery, np.concatenate([people.photos[i][templates:] for i in chosen]))
        subjects = {s.id: s.pk for s in store.list_subjects(gallery, None, len(chosen), SubjectFilter())}
    mates = np.repeat(chosen, [len(people.photos[i]) - templates for i in chosen])
    own = who == np.array([subjects[f"{mate:04d}"] for mate in mates])
    outcomes = []
    for fpir in FPIR:
        hindsight = float(np.quantile(best_stranger, 1 - fpir))
        missed = 1 - float((own & (best >= hindsight)).mean())
        thresholds = {
            source: curve.threshold_at_fmr(fmr_for_fpir(fpir, len(chosen))).similarity
            for source, curve in curves.items()
        }
        for source, threshold in {**thresholds, "fixed": FIXED}.items():
            alarms = float((best_stranger >= threshold).mean())
            fnir = 1 - float((own & (best >= threshold)).mean())
            outcomes.append(Outcome(size, templates, fpir, source, threshold, alarms, fnir, missed))
    return outcomes


@contextmanager
def service(pack: ModelPack) -> Iterator[tuple[Store, Followers, GalleryRisks]]:
    """Of what service.app wires, all that vectors meet."""
    assert pack.calibration is not None  # noqa: S101 - every pack here has one
    with tempfile.TemporaryDirectory() as folder:
        store = Store(open_database(f"sqlite:///{Path(folder) / 'kith.db'}"))
        risks = GalleryRisks(store, {pack.recognition.fingerprint(): Calibration.from_document(pack.calibration)})
        yield store, Followers(in_process(store)), risks
        risks.close()
        store.close()


def enrol(store: Store, pack: ModelPack, photos: Mapping[int, Float]) -> Gallery:
    created = store.create_gallery(
        "people", pack.recognition.fingerprint(), photos[next(iter(photos))].shape[1], GallerySettings()
    )
    for number, vectors in photos.items():
        new = [NewTemplate(uuid.uuid4().hex, vector, "embedding") for vector in vectors]
        store.enrol(created, f"{number:04d}", new, None)
    return store.gallery(created.name)


def search(followers: Followers, gallery: Gallery, probes: Float) -> tuple[NDArray[np.float64], Ints]:
    """(q,) each probe's best similarity, and the key of whom it is."""
    found, _ = followers.of(gallery).search(probes, 1)
    best = [hits[0] for hits in found]
    return np.array([hit.similarity for hit in best]), np.array([hit.subject_pk for hit in best])


def over_http(pack: ModelPack, people: People, folder: Path) -> int:
    """The largest gallery through a real server, at 1 %: how many strangers it decides otherwise than its threshold."""
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
            kith.enrol("people", f"{i:04d}", embeddings=[photos[0]], allow_duplicate=True)
        report = kith.calibrate("people", 0.01)
        gallery = np.stack([photos[0] for photos in people.photos])
        for start in range(0, len(people.strangers), BATCH):
            probes = people.strangers[start : start + BATCH]
            best = (probes @ gallery.T).max(1)
            results = kith.identify("people", embeddings=list(probes), top_k=1).results
            for result, similarity in zip(results, best, strict=True):
                alarmed = result.similarity is not None and result.similarity >= report.threshold
                differing += alarmed != (round(float(similarity), 4) >= report.threshold)
                differing += result.threshold != report.threshold
    return differing


def tables(name: str, outcomes: list[Outcome]) -> str:
    """Ratios of each source, then FNIR, then the promise."""
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
    """What the design promises of one template a person, and whether it was kept."""
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
    """Measured over asked FPIR by the gallery's size, one template a person."""
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
                axes.plot(np.arange(len(SIZES)), trial, "x", color="grey", label="trial (gallery's pairs)")
            axes.set_xticks(np.arange(len(SIZES)), [str(size) for size in SIZES])
            axes.set(yscale="log", title=f"{name} recogniser, FPIR {fpir:.0%} asked", ylim=(0.1, 10))
            axes.grid(alpha=0.3)
        row[0].set_ylabel("measured / asked FPIR")
        row[0].legend(fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("people enrolled")
    figure.savefig(path, dpi=130)


NOTES: Final = """Each cell of pack, gallery and both: measured over asked FPIR, the median of the draws and the range
of the middle 80 %; 1 is a promise kept. All 610 people are one gallery, which has no range. FPIR at 0.4: of a fixed
cosine. FNIR (rank 1) is that of both; hindsight's: with the threshold that these strangers would have chosen. An FPIR
of 0.1 % is four of the 4,069 strangers, of whom five are mislabelled. Draws share people and strangers. The reference
recogniser is calibrated on people of LFW View 1's training list who are not in the protocol; the bundled pack's own
calibration is of the whole list, 361 of the 610 and 1,187 of the strangers among them, which flatters it alone. Photos
of LFW are like photos of LFW: tests/models/test_gallery_risk.py shows what the gallery's own evidence makes good where
they are not.
"""


if __name__ == "__main__":
    main()
