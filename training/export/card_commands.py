"""Commands of a model card, from the provenance of a pack."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from models.pack.manifest import ModelPack
from training.recipes import RECIPES, recipe_overrides

IMITATED: Final = "imitated"
"""Name of the runs of `kith-train imitate`, which trained the bundled recognizer."""
CHECKOUT: Final = "git checkout c4e6a43a61cd5fdd9885f43bc4580ca32e74e005 # the last commit with these commands"
"""First command where `kith-train detector` or `kith-train imitate` made a network."""


def commands(pack: ModelPack) -> list[str]:
    """Return the commands that train and write a pack. A reused network is named by its pack."""
    recognizer: Mapping[str, Any] = pack.provenance["recognizer"]
    detector: Mapping[str, Any] = pack.provenance.get("detector", {})
    trained, detector_option = _detector(detector)
    runs, recognizer_option = _recognizer(recognizer)
    options = [f"--name {pack.model_id}"]
    options += ["--data-terms TERMS"] if recognizer["data"]["terms"] else []
    options += ["--detector-terms TERMS"] if detector.get("terms") else []
    options += [f"--center {recognizer['center']:g}"] if recognizer.get("center") else []
    precision = recognizer.get("precision", "fp16")
    options += [f"--precision {precision}"] if precision != "fp16" else []
    packing = f"kith-train pack {recognizer_option} {detector_option} --data DATA --output OUTPUT"
    removed = [CHECKOUT] if trained or (recognizer["run"]["name"] == IMITATED and runs) else []
    return [*removed, *trained, *runs, f"{packing} \\\n    {' '.join(options)}"]


def _detector(provenance: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the commands that train a detector, and the option that names it."""
    if "pack" in provenance or "run" not in provenance:
        return [], f"--detector-of {provenance.get('pack', 'PACK')}"
    teacher = provenance["run"]["teacher"]
    command = f"kith-train detector --photos PHOTOS --teacher {teacher} --output runs/detector"
    return [command], "--detector runs/detector"


def _recognizer(provenance: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the command that trains a recognizer, and the option that names it."""
    if "pack" in provenance:
        return [], f"--recognizer-of {provenance['pack']}"
    run = provenance["run"]
    output = f"runs/{run['name']}"
    if run["name"] == IMITATED:
        excluded = f" --exclude {run['data']['exclude']}" if run["data"]["exclude"] else ""
        teacher = run["distill"]["teacher"]
        command = f"kith-train imitate DATA/{run['data']['root']} --teacher {teacher}{excluded} --output {output}"
        return [command], f"--recognizer {output}"
    if run["name"] not in RECIPES:
        return [f"# {output} is no recipe: manifest.json has its settings"], f"--recognizer {output}"
    teacher = f" --teacher {run['distill']['teacher']}" if run["distill"]["teacher"] else ""
    align = "" if run["data"]["aligned"] else " --align-with PACK"
    changed = "".join(f" \\\n    --set {shlex.quote(setting)}" for setting in recipe_overrides(run))
    command = f"kith-train run {run['name']} --data DATA/{run['data']['root']}{teacher}{align} --output {output}"
    return [command + changed], f"--recognizer {output}"
