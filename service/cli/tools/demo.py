"""Demo: enroll people on a real server, identify them in altered and group photos, and reject strangers.

The photos come from Python packages (scikit-image's astronaut and InsightFace's samples), because Kith ships none.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from kith import Kith
from kith.wire.identification import IdentityOut
from service.cli.tools.drawing import draw_decisions
from service.core.errors import SettingsError
from service.core.text import describe_outcome, format_odds

GALLERY: Final = "demo"
FPIR: Final = 0.001
FMR: Final = 0.001
MIN_TOLERANCE_PX: Final = 5.0
MAX_TEXT_COLUMNS: Final = 100
GROUP_SCALE: Final = 0.8
"""Size of the group photo in which people are identified, relative to the one they are enrolled from."""
NEXT_STEPS: Final = """
[bold]Use your own photos[/bold], in folders named after people (ada/1.jpg, grace/1.jpg):
   kith enroll people/ --gallery family
   kith identify party.jpg --gallery family --draw who.jpg
   kith gallery risk family         threshold for each risk
   kith serve                       the same in a browser and over HTTP, on http://127.0.0.1:8000
More: kith --help, README.md, docs/cli.md"""

BoxPx = list[float]
"""x0, y0, x1, y1."""


class PhotosMissingError(SettingsError):
    code, title = "demo_photos", "The demo's photos are not installed"
    remedy = "Run 'make demo', which installs them, or install scikit-image and (with --no-deps) insightface."


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


def run_demo(kith: Kith, output: Path, console: Console) -> bool:
    """Run the demo, write ``decisions.png`` to the folder ``output``, and return whether every decision is correct."""
    return _Demo(kith, console).run(output)


class _Demo:
    """Steps of the demo. Each step explains itself and judges its decisions."""

    def __init__(self, kith: Kith, console: Console) -> None:
        self._kith, self._console = kith, console
        self._astronaut, self._actor, self._group = sample_photos()
        self._names = {"collins": "Eileen Collins", "hanks": "Tom Hanks"}
        self._friends: dict[str, BoxPx] = {}
        self._faces_in_group = 0
        self._correct: list[bool] = []
        self._steps = 0

    def run(self, output: Path) -> bool:
        self._create_gallery()
        self._enroll()
        astronaut = alter(self._astronaut, mirror=True, turn_deg=6, scale=0.7, light=0.75, jpeg=60)
        actor = alter(self._actor, mirror=False, turn_deg=-9, scale=0.9, light=1.2, jpeg=50)
        self._verify(astronaut, actor)
        self._identify(astronaut, actor)
        output.mkdir(parents=True, exist_ok=True)
        picture = output / "decisions.png"
        self._identify_group(picture)
        correct = all(self._correct)
        verdict = (
            f"All {len(self._correct)} decisions are correct" if correct else "[red]Not every decision is correct[/red]"
        )
        self._console.print(f"\n{verdict}. Annotated group photo: [bold]{picture}[/bold]")
        self._console.print(NEXT_STEPS, highlight=False)
        return correct

    def _create_gallery(self) -> None:
        model = self._kith.model()
        self._explain(
            "Start a server",
            "The demo started a server on this machine with a temporary database. It serves "
            f"[bold]{escape(model.display_name)}[/bold] on {model.recognition.providers[0]}. One network detects "
            f"faces. Another turns a face into {model.dimension} numbers, similar for photos of the same person.",
        )
        self._kith.create_gallery(GALLERY, risk={"fpir": FPIR})
        self._explain(
            "Create a gallery with an accepted risk",
            f"A gallery holds known people. This one accepts that {format_odds(FPIR)} searches for a stranger returns "
            "a name. Kith derives the similarity threshold from that risk, and raises it as the gallery grows.",
        )

    def _enroll(self) -> None:
        (image,) = self._kith.detect(encode_jpeg(self._group)).images
        boxes = sorted((face.box for face in image.faces), key=lambda box: box[0])
        self._faces_in_group = len(boxes)
        photos = {"collins": self._astronaut, "hanks": self._actor}
        for number, box in enumerate((boxes[0], boxes[3]), start=1):
            subject = f"friend-{number}"
            self._names[subject], self._friends[subject] = f"Friend {number}", box
            photos[subject] = self._group.crop(_with_margin(box, self._group))
        for subject, photo in photos.items():
            self._kith.put_subject(GALLERY, subject, name=self._names[subject])
            self._kith.enroll(GALLERY, subject, encode_jpeg(photo), face="largest")
        self._explain(
            f"Enroll {len(self._names)} people",
            f"{', '.join(self._names.values())}: one photo each. Kith stores the numbers encrypted, and no photo.",
        )

    def _verify(self, astronaut: bytes, actor: bytes) -> None:
        self._explain(
            "Verify: do two photos show the same person?",
            "Compare the astronaut's photo with an altered copy: mirrored, rotated, smaller and darker. Then compare "
            "it with the actor's photo.",
        )
        for title, other, expected in (
            ("astronaut, mirrored, rotated, darker", astronaut, "same"),
            ("astronaut and actor", actor, "different"),
        ):
            pair = self._kith.verify(encode_jpeg(self._astronaut), other, risk={"fmr": FMR})
            chance = (pair.false_match_probability, pair.probability_is_bound)
            self._judge(title, expected, pair.outcome, pair.similarity, pair.threshold, chance)

    def _identify(self, astronaut: bytes, actor: bytes) -> None:
        self._explain("Identify: who is this?", "Search the gallery for the people in altered photos.")
        for title, probe, subject in (
            ("astronaut, mirrored, rotated, darker", astronaut, "collins"),
            ("actor, rotated, brighter, recompressed", actor, "hanks"),
        ):
            (result,) = self._kith.identify(GALLERY, probe, faces="largest").results
            self._judge_identity(title, self._names[subject], result)

    def _identify_group(self, picture: Path) -> None:
        self._explain(
            "Identify people in a group with strangers",
            f"{len(self._friends)} of the {self._faces_in_group} people are enrolled. The others must not be named; "
            "one who resembles a friend is uncertain, and left to a person.",
        )
        photo = alter(self._group, mirror=False, turn_deg=0, scale=GROUP_SCALE, light=0.85, jpeg=70)
        results = self._kith.identify(GALLERY, photo).results
        draw_decisions(photo, results, picture)
        friends = []
        for number, result in enumerate(sorted(results, key=lambda r: r.face.box[0] if r.face else 0.0), start=1):
            near = (s for s, box in self._friends.items() if result.face and _is_near(result.face.box, box))
            friend = next(near, None)
            expected = "unknown" if friend is None else self._names[friend]
            friends += [] if friend is None else [friend]
            self._judge_identity(f"group photo, face {number} from the left", expected, result)
        if len(results) != self._faces_in_group or len(friends) != len(self._friends):
            self._correct.append(False)
            self._console.print(
                f"[red]Found {len(results)} of {self._faces_in_group} faces in the smaller group photo[/red]"
            )

    def _explain(self, title: str, text: str) -> None:
        self._steps += 1
        self._console.print(f"\n[bold]{self._steps}. {title}[/bold]")
        self._console.print(Padding(text, (0, 0, 0, 3)), width=min(self._console.width, MAX_TEXT_COLUMNS))

    def _judge_identity(self, title: str, expected: str, result: IdentityOut) -> None:
        outcome = (result.name or result.subject or "") if result.outcome == "identified" else result.outcome
        chance = (result.false_alarm_probability, result.probability_is_bound)
        self._judge(title, expected, outcome, result.similarity, result.threshold, chance)

    def _judge(
        self,
        title: str,
        expected: str,
        outcome: str,
        similarity: float | None,
        threshold: float | None,
        chance: tuple[float | None, bool | None],
    ) -> None:
        """Print a decision. ``chance``: probability that a stranger scores this high, and whether it is a bound."""
        # A stranger must not be named. One in profile may fail the quality check before the search, and a lookalike may
        # be left to a person's decision.
        unnamed = ("uncertain", "rejected_quality")
        correct = outcome == expected or (expected == "unknown" and outcome in unnamed)
        self._correct.append(correct)
        scores = ""
        if similarity is not None and threshold is not None:
            relation = "reaches" if similarity >= threshold else "is below"
            probability, is_bound = chance
            by_chance = "" if probability is None else f"; by chance: {format_odds(probability, is_bound)}"
            scores = f" (similarity {similarity:.2f} {relation} {threshold:.2f}{by_chance})"
        mark = "[green]correct[/green]" if correct else "[red]WRONG[/red]"
        words = escape(describe_outcome(outcome, None))
        self._console.print(f"   {mark}  {escape(title)}: [bold]{words}[/bold]{scores}")


def _with_margin(box: BoxPx, image: Image.Image) -> tuple[int, int, int, int]:
    x0, y0, x1, y1 = box
    dx, dy = 0.5 * (x1 - x0), 0.4 * (y1 - y0)
    low = (max(0, round(x0 - dx)), max(0, round(y0 - dy)))
    return *low, min(image.width, round(x1 + dx)), min(image.height, round(y1 + dy))


def _is_near(box: BoxPx, enrolled: BoxPx) -> bool:
    """Tell whether the centers of a box and an enrolled one agree within half the box's width, at GROUP_SCALE."""
    center = [(box[i] + box[i + 2]) / 2 for i in (0, 1)]
    other = [(enrolled[i] + enrolled[i + 2]) / 2 * GROUP_SCALE for i in (0, 1)]
    return max(abs(a - b) for a, b in zip(center, other, strict=True)) < max(MIN_TOLERANCE_PX, (box[2] - box[0]) / 2)
