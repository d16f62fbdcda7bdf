"""The demo: enrol people through a real server, name them in altered and group photos, call strangers unknown.

The photos come with Python packages (scikit-image's astronaut, InsightFace's samples), since none is shipped here.
"""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageEnhance
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from service.api.schemas import IdentityOut
from service.client import Kith
from service.drawing import draw_decisions
from service.errors import SettingsError
from service.words import decision, odds

GALLERY = "demo"
FPIR = 0.001
MIN_OVERLAP_PX = 5.0
MOST_COLUMNS = 100


class PhotosMissingError(SettingsError):
    code, title = "demo_photos", "The demo's photos are not installed"
    remedy = "Run 'make demo', which installs them, or install scikit-image and (with --no-deps) insightface."


@dataclass(frozen=True)
class Line:
    """One decision: what was shown, what should come out, what came out."""

    photo: str
    expected: str
    outcome: str
    similarity: float | None
    threshold: float | None
    false_alarm_probability: float | None

    @property
    def right(self) -> bool:
        # A stranger seen from the side is turned away before a search, which names nobody either.
        return self.outcome == self.expected or (self.expected == "unknown" and self.outcome == "rejected_quality")


def package_file(package: str, *parts: str) -> Path:
    """A file of an installed package, without importing it. Raises PhotosMissingError."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(root, *parts)).is_file():
            return path
    raise PhotosMissingError(f"{package} does not provide {'/'.join(parts)}")


def altered(photo: Image.Image, mirror: bool, turn_deg: float, scale: float, light: float, jpeg: int) -> bytes:
    """A copy of the photo, as another phone, a messenger and a bad lamp would make of it."""
    image = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else photo
    image = image.rotate(turn_deg, Image.Resampling.BICUBIC, expand=True)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    return encoded(ImageEnhance.Brightness(image).enhance(light), jpeg)


def encoded(image: Image.Image, quality: int = 92) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def run_demo(kith: Kith, output: Path, console: Console) -> bool:
    """Enrol, verify, identify, and say what is done and why; write the picture. Returns whether all was decided
    rightly."""
    astronaut = Image.open(package_file("skimage", "data", "astronaut.png")).convert("RGB")
    actor = Image.open(package_file("insightface", "data", "images", "Tom_Hanks_54745.png")).convert("RGB")
    group = Image.open(package_file("insightface", "data", "images", "t1.jpg")).convert("RGB")

    model = kith.model()
    told = _Narration(console)
    told.step(
        "A server runs",
        f"The demo started one on this machine, with a database that is thrown away afterwards. It "
        f"serves [bold]{escape(model.display_name)}[/bold] on {model.recognition.providers[0]}: a network that finds "
        f"faces, and one that turns a face into {model.dimension} numbers, alike for photos of one person.",
    )

    kith.create_gallery(GALLERY, risk={"fpir": FPIR})
    told.step(
        "A gallery, and the risk that is accepted",
        f"A gallery holds the people one knows. For this one we accept that {odds(FPIR)} searches for a stranger names "
        "somebody. Kith finds the similarity that keeps to it, and raises it as the gallery grows: nobody guesses a "
        "threshold.",
    )

    names = {"collins": "Eileen Collins", "hanks": "Tom Hanks"}
    for subject, photo in (("collins", astronaut), ("hanks", actor)):
        kith.put_subject(GALLERY, subject, name=names[subject])
        kith.enrol(GALLERY, subject, encoded(photo), face="largest")
    # Two of the group photo's six: cut out with a margin, as one would crop a contact picture.
    faces = sorted((face.box for face in kith.detect(encoded(group)).images[0].faces), key=lambda box: box[0])
    friends = {"friend-1": faces[0], "friend-2": faces[3]}
    for number, (subject, box) in enumerate(friends.items(), start=1):
        names[subject] = f"Friend {number}"
        kith.put_subject(GALLERY, subject, name=names[subject])
        kith.enrol(GALLERY, subject, encoded(group.crop(_with_margin(box, group))), face="largest")
    told.step(
        f"Enrolling {len(names)} people",
        f"{', '.join(names.values())}: one photo each. What is kept of a photo is its numbers, encrypted; the photo is "
        "not.",
    )

    lines = []
    probe_a = altered(astronaut, mirror=True, turn_deg=6, scale=0.7, light=0.75, jpeg=60)
    probe_b = altered(actor, mirror=False, turn_deg=-9, scale=0.9, light=1.2, jpeg=50)
    told.step(
        "Verifying: do two photos show one person?",
        "The astronaut's photo beside a copy of it, mirrored, turned, smaller and darker; and beside the actor's.",
    )
    for title, other, expected in (
        ("verify: astronaut, mirrored, turned, darker", probe_a, "same"),
        ("verify: astronaut and actor", probe_b, "different"),
    ):
        pair = kith.verify(encoded(astronaut), other, fmr=0.001)
        lines.append(Line(title, expected, pair.outcome, pair.similarity, pair.threshold, pair.false_match_probability))
        told.seen(lines[-1])

    told.step(
        "Identifying: who is this?",
        "Photos changed as a phone, a messenger or a bad lamp would change them, searched for in the gallery.",
    )
    for title, probe, expected in (
        ("identify: astronaut, mirrored, turned, darker", probe_a, names["collins"]),
        ("identify: actor, turned, brighter, recompressed", probe_b, names["hanks"]),
    ):
        (result,) = kith.identify(GALLERY, probe, faces="largest").results
        lines.append(_line(title, expected, result))
        told.seen(lines[-1])

    told.step(
        "A group, and strangers in it",
        f"{len(faces)} people, of whom {len(friends)} are enrolled. The others are nobody we know, and a good answer "
        "says so; of a face turned away too far it says that it cannot tell.",
    )
    smaller = altered(group, mirror=False, turn_deg=0, scale=0.8, light=0.85, jpeg=70)
    results = kith.identify(GALLERY, smaller).results
    for number, result in enumerate(sorted(results, key=lambda r: r.face.box[0] if r.face else 0.0), start=1):
        mine = next((s for s, box in friends.items() if result.face and _near(result.face.box, box, 0.8)), None)
        title = f"identify: group photo, face {number} from the left"
        lines.append(_line(title, names.get(mine or "", "unknown"), result))
        told.seen(lines[-1])

    output.mkdir(parents=True, exist_ok=True)
    picture = output / "decisions.png"
    draw_decisions(smaller, results, picture, GALLERY)
    enrolled_seen = sum(line.expected.startswith("Friend") for line in lines)
    complete = len(results) == len(faces) and enrolled_seen == len(friends)
    if not complete:
        console.print(f"[red]the group photo shows {len(faces)} faces; {len(results)} were found again[/red]")
    right = complete and all(line.right for line in lines)
    told.end(right, len(lines), picture)
    return right


class _Narration:
    """Says what is done, why, and what came of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    def step(self, what: str, why: str) -> None:
        self._steps += 1
        self._console.print(f"\n[bold]{self._steps}. {what}[/bold]")
        self._console.print(Padding(why, (0, 0, 0, 3)), width=min(self._console.width, MOST_COLUMNS))

    def seen(self, line: Line) -> None:
        """One decision, in words."""
        sign = "[green]right[/green]" if line.right else "[red]WRONG[/red]"
        what = line.photo.partition(": ")[2]
        self._console.print(
            f"   {sign}  {escape(what)}: [bold]{escape(decision(line.outcome, line.outcome))}[/bold]{_why(line)}"
        )

    def end(self, right: bool, decisions: int, picture: Path) -> None:
        verdict = f"{decisions} decisions, all right" if right else "[red]not every decision was right[/red]"
        self._console.print(f"\n{verdict}. Who is who in the group: [bold]{picture}[/bold]")
        self._console.print(
            "\n[bold]Now your own photos[/bold], in folders of people's names (ada/1.jpg, grace/1.jpg):\n"
            "   kith enroll people/ --gallery family\n"
            "   kith identify party.jpg --gallery family --draw who.jpg\n"
            "   kith gallery risk family         which threshold keeps which risk\n"
            "   kith serve                       the same in a browser and over HTTP, on http://127.0.0.1:8000\n"
            "More: kith --help, README.md, docs/cli.md",
            highlight=False,
        )


def _why(line: Line) -> str:
    """Beside its threshold, and how likely a stranger would be so alike."""
    if line.similarity is None or line.threshold is None:
        return ""
    above = "reaches" if line.similarity >= line.threshold else "is below"
    told = f" (similarity {line.similarity:.2f} {above} {line.threshold:.2f}"
    return (
        f"{told}{'' if line.false_alarm_probability is None else f'; by chance: {odds(line.false_alarm_probability)}'})"
    )


def _line(title: str, expected: str, result: IdentityOut) -> Line:
    outcome = (result.name or result.subject or "") if result.outcome == "identified" else result.outcome
    return Line(title, expected, outcome, result.similarity, result.threshold, result.false_alarm_probability)


def _with_margin(box: list[float], image: Image.Image) -> tuple[int, int, int, int]:
    x0, y0, x1, y1 = box
    dx, dy = 0.5 * (x1 - x0), 0.4 * (y1 - y0)
    return (
        max(0, round(x0 - dx)),
        max(0, round(y0 - dy)),
        min(image.width, round(x1 + dx)),
        min(image.height, round(y1 + dy)),
    )


def _near(box: list[float], reference: list[float], scale: float) -> bool:
    """Whether the centres of a box and of a scaled reference box agree to within half the box's width."""
    centre = [(box[i] + box[i + 2]) / 2 for i in (0, 1)]
    other = [(reference[i] + reference[i + 2]) / 2 * scale for i in (0, 1)]
    return max(abs(a - b) for a, b in zip(centre, other, strict=True)) < max(MIN_OVERLAP_PX, (box[2] - box[0]) / 2)
