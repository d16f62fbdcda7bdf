"""Build the files of a release from the last commit into a folder, and list the remaining steps before publishing.

Writes wheels and source archives of server and client, the bill of materials, SHA256SUMS, and provenance in SLSA's
format. Exits 1 while steps are left.

    python -m requirements.release dist
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from requirements.check import bill_of_materials

ROOT: Final = Path(__file__).parent.parent
PROJECTS: Final = (".", "kith")
"""Folders of the server's and the client's pyproject.toml."""


def main() -> None:
    target = Path(sys.argv[1])
    build(target)
    left = steps_left(ROOT)
    print("\n".join([f"Wrote {target}", *(f"left: {step}" for step in left)]))
    sys.exit(bool(left))


def build(target: Path) -> None:
    """Write all files of a release to ``target``, which must be empty or missing. Uncommitted changes are ignored."""
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        sys.exit(f"{target} is not empty: name a new folder")
    # Archives get the commit's time, so that another machine can build equal ones.
    environment = os.environ | {"SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct").strip()}
    with tempfile.TemporaryDirectory() as folder:
        tarball = Path(folder) / "source.tar"
        _git("archive", f"--output={tarball}", "HEAD")
        with tarfile.open(tarball) as archive:
            if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(folder)  # noqa: S202 - our own files
        for project in PROJECTS:
            command = [sys.executable, "-m", "uv", "--quiet", "build", "--no-build-isolation", "--no-create-gitignore"]
            source = Path(folder) / project
            subprocess.run([*command, "--out-dir", str(target.resolve())], cwd=source, env=environment, check=True)
    bill_of_materials(target / "sbom.json")
    digests = {file.name: _digest(file) for file in sorted(target.iterdir())}
    (target / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (target / "provenance.json").write_text(json.dumps(provenance(digests), indent=2) + "\n")


def provenance(digests: dict[str, str]) -> dict[str, Any]:
    """Return which files were built from which commit with which locked packages (slsa.dev/provenance/v1)."""
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    commit = {"digest": {"gitCommit": _git("rev-parse", "HEAD").strip()}, "name": "source"}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "requirements.release",
                "externalParameters": {"version": version(ROOT)},
                "resolvedDependencies": [
                    commit,
                    *({"name": lock.name, "digest": {"sha256": _digest(lock)}} for lock in locks),
                ],
            },
            "runDetails": {"builder": {"id": f"python {sys.version.split()[0]}"}},
        },
    }


def steps_left(root: Path) -> Sequence[str]:
    """Return the steps of docs/deployment.md that were not done."""
    number = version(root)
    projects = [root / project / "pyproject.toml" for project in PROJECTS]
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    steps = {
        "set the version in both pyproject.toml, without .dev": re.fullmatch(r"\d+\.\d+\.\d+", number)
        and all(_project(file)["version"] == number for file in projects),
        "remove the classifier that forbids an upload": not any(
            "Private :: Do Not Upload" in _project(file)["classifiers"] for file in projects
        ),
        "date the version in CHANGELOG.md": re.search(
            rf"^## {re.escape(number)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.M
        ),
        "set the tag of the images in docker/kubernetes": _image_tags(root) == {number},
        "sign the tag": f"v{number}" in _git("tag", "--points-at", "HEAD", root=root).split(),
    }
    return [step for step, done in steps.items() if not done]


def version(root: Path) -> str:
    return str(_project(root / "pyproject.toml")["version"])


def _project(file: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return project


def _image_tags(root: Path) -> set[str]:
    files = (root / "docker" / "kubernetes").glob("*/kustomization.yaml")
    return {tag for file in files for tag in re.findall(r'newTag: "([^"]+)"', file.read_text(encoding="utf-8"))}


def _git(*words: str, root: Path = ROOT) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
