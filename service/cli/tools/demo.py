"""Demo: enroll people on a real server, identify them in altered and group photos, and reject strangers.

The photos come from Python packages (scikit-image's astronaut and InsightFace's samples), because Kith ships none. The
demo leaves them in its folder for the commands that it prints and for docs/tutorial.md.
"""

from __future__ import annotations

import importlib.util
import io
import shlex
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from shutil import which
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kith import Kith
from kith.wire.identification import IdentityOut
from kith.wire.verification import VerifyOut
from service.cli.tools.drawing import draw_decisions
from service.cli.words import describe_outcome, format_odds
from service.core.errors import SettingsError

GALLERY: Final = "demo"
FPIR: Final = 0.001
FMR: Final = 0.001
MAX_TEXT_COLUMNS: Final = 100
NAMES: Final = {"eileen": "Eileen Collins", "tom": "Tom Hanks", "robin": "Robin", "sam": "Sam"}
FRIEND_BOXES_PX: Final = {"robin": (15, 210, 225, 450), "sam": (225, 90, 420, 330)}
"""Left, top, right and bottom of the two people at the left of the group photo, from the left."""
GROUP_SIZE: Final = 6
VISITOR, PARTY = Path("visitor.jpg"), Path("party.jpg")
ALTERED: Final = "astronaut, mirrored, rotated, darker"
NEXT_STEPS: Final = """
[bold]Do the same[/bold] with these photos, or with your own, in a folder per person:
   {kith} enroll {folder}/people --gallery family --largest-face
   {kith} identify {folder}/party.jpg --gallery family --draw {folder}/who.png
   {kith} serve  # then open http://127.0.0.1:8000/console
More: docs/tutorial.md, {kith} --help"""


class PhotosMissingError(SettingsError):
    code = "demo_photos"


def package_file(package: str, *parts: str) -> Path:
    """Return a file of an installed package without importing it. Raises PhotosMissingError."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(root, *parts)).is_file():
            return path
    raise PhotosMissingError(f"{package} does not provide {'/'.join(parts)}")


def sample_photos() -> tuple[Image.Image, Image.Image, Image.Image]:
    """Return RGB photos of an astronaut, an actor, and a group of six. Raises PhotosMissingError."""
    files = (
        package_file("skimage", "data", "astronaut.png"),
        package_file("insightface", "data", "images", "Tom_Hanks_54745.png"),
        package_file("insightface", "data", "images", "t1.jpg"),
    )
    astronaut, actor, group = (Image.open(file).convert("RGB") for file in files)
    return astronaut, actor, group


def alter(photo: Image.Image, mirror: bool, turn_deg: float, scale: float, light: float, jpeg: int) -> bytes:
    """Return a mirrored, rotated, scaled, brightened and recompressed copy, as another camera would take it."""
    image = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else photo
    image = image.rotate(turn_deg, Image.Resampling.BICUBIC, expand=True)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    return encode_jpeg(ImageEnhance.Brightness(image).enhance(light), jpeg)


def encode_jpeg(image: Image.Image, quality: int = 92) -> bytes:
    """Return the image as JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def varied_samples() -> Iterator[NDArray[np.uint8]]:
    """Yield altered copies of the sample photos as (H, W, 3) RGB. Raises PhotosMissingError."""
    for photo in sample_photos():
        # Light changes slowest, so that every second copy has all lights (`collect_samples`).
        for light, mirror, (turn_deg, scale) in product((0.7, 1.2), (False, True), ((0, 1.0), (-8, 0.7), (8, 0.5))):
            content = alter(photo, mirror, turn_deg, scale, light, jpeg=80)
            yield np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def write_photos(folder: Path) -> None:
    """Write a photo of each of four people, one of a visitor (Eileen, altered), and one of a party.

    The party shows Robin, Sam and four strangers. Raises PhotosMissingError.
    """
    astronaut, actor, group = sample_photos()
    people = {"eileen": astronaut, "tom": actor, **{name: group.crop(box) for name, box in FRIEND_BOXES_PX.items()}}
    photos = {_portrait(name): encode_jpeg(photo) for name, photo in people.items()}
    photos[VISITOR] = alter(astronaut, mirror=True, turn_deg=6, scale=0.7, light=0.75, jpeg=60)
    photos[PARTY] = alter(group, mirror=False, turn_deg=0, scale=0.8, light=0.85, jpeg=70)
    for path, content in photos.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def run_demo(kith: Kith, output: Path, console: Console) -> bool:
    """Run the demo, and return whether every decision is correct.

    Writes the photos and ``decisions.png``, an annotated photo, to the folder ``output``. Raises PhotosMissingError.
    """
    write_photos(output)
    report, model, picture = _Report(console), kith.model(), output / "decisions.png"
    kith.create_gallery(GALLERY, risk={"fpir": FPIR})
    report.explain(
        "Create a gallery with an accepted risk",
        f"The demo started a server with a temporary database and [bold]{escape(model.display_name)}[/bold]. A gallery "
        f"holds known people. This one accepts that {format_odds(FPIR)} searches for a stranger returns a name. Kith "
        "derives the similarity threshold from that risk, and raises it as the gallery grows.",
    )
    for subject, name in NAMES.items():
        kith.put_subject(GALLERY, subject, name=name)
        kith.enroll(GALLERY, subject, output / _portrait(subject), face="largest")
    report.explain(
        f"Enroll {len(NAMES)} people",
        f"{', '.join(NAMES.values())}: one photo each. Kith stores {model.dimension} numbers of each face, encrypted, "
        "and no photo.",
    )
    report.explain("Verify: do two photos show the same person?", "Compare the astronaut's photo with two others.")
    for title, other, expected in (
        (ALTERED, VISITOR, "same"),
        ("astronaut and actor", _portrait("tom"), "different"),
    ):
        pair = kith.verify(output / _portrait("eileen"), output / other, risk={"fmr": FMR})
        report.judge(title, expected, pair, pair.false_match_probability)
    report.explain("Identify: who is this?", "Search the gallery for the person in the altered photo.")
    (found,) = kith.identify(GALLERY, output / VISITOR).results
    report.judge(ALTERED, NAMES["eileen"], found, found.false_alarm_probability)
    report.explain(
        "Identify people in a group with strangers",
        f"{len(FRIEND_BOXES_PX)} of the {GROUP_SIZE} people are enrolled. The others must not be named; one who "
        "resembles an enrolled person may be uncertain, and left to a person.",
    )
    results = sorted(kith.identify(GALLERY, output / PARTY).results, key=lambda r: r.face.box[0] if r.face else 0.0)
    draw_decisions((output / PARTY).read_bytes(), results, picture)
    party = [NAMES[friend] for friend in FRIEND_BOXES_PX] + ["unknown"] * (GROUP_SIZE - len(FRIEND_BOXES_PX))
    for number, (expected, found) in enumerate(zip(party, results, strict=False), start=1):
        title = f"group photo, face {number} from the left"
        report.judge(title, expected, found, found.false_alarm_probability)
    correct = all(report.correct) and len(results) == GROUP_SIZE
    verdict = (
        f"All {len(report.correct)} decisions are correct" if correct else "[red]Not every decision is correct[/red]"
    )
    console.print(f"\n{verdict}. Annotated group photo: [bold]{escape(str(picture))}[/bold]", soft_wrap=True)
    words = {"kith": _program(), "folder": shlex.quote(str(output))}
    steps = NEXT_STEPS.format_map({name: escape(word) for name, word in words.items()})
    console.print(steps, highlight=False, soft_wrap=True)
    return correct


class _Report:
    """Text of the demo: numbered steps, and its decisions with their scores."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self.correct: list[bool] = []

    def explain(self, title: str, text: str) -> None:
        self._steps += 1
        self._console.print(f"\n[bold]{self._steps}. {title}[/bold]")
        self._console.print(Padding(text, (0, 0, 0, 3)), width=min(self._console.width, MAX_TEXT_COLUMNS))

    def judge(self, title: str, expected: str, found: VerifyOut | IdentityOut, chance: float | None) -> None:
        """Print a decision. ``chance``: probability that a stranger scores this high."""
        named = isinstance(found, IdentityOut) and found.outcome == "identified" and (found.name or found.subject)
        outcome = named or found.outcome
        # A stranger must not be named. One in profile may fail the quality check before the search, and a lookalike may
        # be left to a person's decision.
        unnamed = ("uncertain", "rejected_quality")
        self.correct.append(outcome == expected or (expected == "unknown" and outcome in unnamed))
        scores = ""
        if found.similarity is not None and found.threshold is not None:
            relation = "reaches" if found.similarity >= found.threshold else "is below"
            by_chance = "" if chance is None else f"; by chance: {format_odds(chance, found.probability_is_bound)}"
            scores = f" (similarity {found.similarity:.2f} {relation} {found.threshold:.2f}{by_chance})"
        mark = "[green]correct[/green]" if self.correct[-1] else "[red]WRONG[/red]"
        words = escape(describe_outcome(outcome, None))
        self._console.print(f"   {mark}  {escape(title)}: [bold]{words}[/bold]{scores}")


def _portrait(subject: str) -> Path:
    return Path("people", subject, "1.jpg")


def _program() -> str:
    """Return the word that runs this program from the user's shell, where its folder may not be in PATH."""
    started, found = Path(sys.argv[0]), which("kith")
    if started.stem != "kith" or (found is not None and started.exists() and started.samefile(found)):
        return "kith"
    return shlex.quote(sys.argv[0])
