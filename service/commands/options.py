"""Options and arguments that mean the same wherever they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from service.commands.completion import complete_galleries, complete_jobs, complete_packs, complete_subjects

LEAST_RISK: Final = 1e-12
MOST_RISK: Final = 1 - 1e-12
"""A risk of 1 is none."""

Url = Annotated[str | None, typer.Option(envvar="KITH_URL", help="Server to talk to; default: the local database.")]
Key = Annotated[str | None, typer.Option(envvar="KITH_CLIENT_KEY", help="API key for --url.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Gallery = Annotated[str, typer.Option("--gallery", "-g", help="Which gallery.", autocompletion=complete_galleries)]
GalleryName = Annotated[str, typer.Argument(metavar="GALLERY", help="Its name.", autocompletion=complete_galleries)]
OneGallery = Annotated[
    str | None, typer.Option("--gallery", "-g", help="Only this gallery's.", autocompletion=complete_galleries)
]
Subject = Annotated[str, typer.Argument(help="The subject's id.", autocompletion=complete_subjects)]
JobId = Annotated[str, typer.Argument(help="As 'kith jobs list' names it.", autocompletion=complete_jobs)]
PackName = Annotated[str, typer.Argument(help="As 'kith models list' names it.", autocompletion=complete_packs)]

Photos = Annotated[list[Path], typer.Argument(help="Files; one or several.", exists=True, dir_okay=False)]

LargestFace = Annotated[bool, typer.Option("--largest-face", help="Of several faces, take the largest.")]
AllowDuplicate = Annotated[
    bool, typer.Option("--allow-duplicate", help="Also those who are enrolled under another name.")
]
AllowInconsistent = Annotated[
    bool, typer.Option("--allow-inconsistent", help="Also photos unlike the person's others.")
]
AllowLowQuality = Annotated[bool, typer.Option("--allow-low-quality", help="Also photos below the gallery's gate.")]
AllowNotLive = Annotated[
    bool, typer.Option("--allow-not-live", help="Also faces that look like pictures, where the gallery refuses them.")
]

Fpir = Annotated[
    float | None,
    typer.Option(
        min=LEAST_RISK, max=MOST_RISK, help="Risk: how often a search may call a stranger somebody, as 0.001."
    ),
]
Fmr = Annotated[
    float | None,
    typer.Option(
        min=LEAST_RISK, max=MOST_RISK, help="Risk: how often one comparison may take two people for one, as 0.001."
    ),
]
Threshold = Annotated[
    float | None, typer.Option(min=-1.0, max=1.0, help="A bare similarity instead of a risk, as 0.4.")
]
Preset = Annotated[
    Literal["strict", "standard", "relaxed"] | None,
    typer.Option(help="A risk by name: 1 in 10,000, 1 in 1,000, 1 in 100."),
]


def risk_of(
    fpir: float | None, fmr: float | None, threshold: float | None, preset: str | None
) -> dict[str, float | str] | None:
    """What the API calls a risk; None: none was given. Raises typer.BadParameter: several were."""
    given: dict[str, Any] = {"fpir": fpir, "fmr": fmr, "threshold": threshold, "preset": preset}
    named = {kind: value for kind, value in given.items() if value is not None}
    if len(named) > 1:
        raise typer.BadParameter("give one of them alone", param_hint=", ".join(f"--{kind}" for kind in named))
    return named or None
