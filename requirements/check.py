"""Check the supply chain: known vulnerabilities, licenses, wheels for aarch64, and a bill of materials.

Writes build/sbom.json (CycloneDX) and build/licenses.md. Exits 1 for a known vulnerability that
requirements/vulnerabilities.toml does not allow, a license that requirements/licenses.toml does not list, or a package
of the image without a wheel for aarch64. If the vulnerability service or the package index cannot be reached, or does
not know a package, the check reports that and does not fail.

    python -m requirements.check
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
BUILD: Final = HERE.parent / "build"
OURS: Final = "kith-face"
BESIDE: Final = Path(sys.executable).parent
TIMEOUT_S: Final = 120
AARCH64: Final = "aarch64-manylinux_2_35"
"""Platform of Linux on aarch64: OpenVINO's wheel needs glibc 2.35, as in Debian 12 and Ubuntu 22.04."""
Document = Mapping[str, Any]


def main() -> None:
    BUILD.mkdir(exist_ok=True)
    audited, licenses = audit(), found_licenses()
    (BUILD / "licenses.md").write_text(license_table(licenses), encoding="utf-8")
    bill = bill_of_materials(BUILD / "sbom.json")
    problems = [
        *vulnerable(audited, read("vulnerabilities.toml"), datetime.now(UTC).date()),
        *unlicensed(licenses, read("licenses.toml")),
        *missing(bill, installed()),
        *without_wheel("cpu-all.txt", AARCH64),
    ]
    unknown = not_audited(audited)
    if unknown:
        print(
            f"WARNING: {len(unknown)} of {len(installed())} packages were NOT looked up for known vulnerabilities "
            f"({unknown[0][1]}). Run make supply where the vulnerability service can be reached."
        )
    print(f"{len(licenses)} licenses, {len(bill['components'])} components in {BUILD.name}/sbom.json")
    print("\n".join(problems) or "no problem found")
    sys.exit(bool(problems))


def read(name: str) -> Document:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def normal(name: str) -> str:
    """Normalize a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return versions by name, without Kith itself."""
    found = {normal(one.metadata["Name"]): one.version for one in distributions()}
    found.pop(OURS, None)
    return found


# Vulnerabilities


def audit(*arguments: str) -> list[Document]:
    """Return pip-audit's entry for each installed package; all have a skip_reason if the service does not answer."""
    command = [
        str(BESIDE / "pip-audit"),
        "--local",
        "--skip-editable",
        "--progress-spinner",
        "off",
        "--format",
        "json",
        *arguments,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return [{"name": name, "skip_reason": "the vulnerability service did not answer"} for name in installed()]
    found: list[Document] = answer["dependencies"]
    return found


def not_audited(audited: Sequence[Document]) -> list[tuple[str, str]]:
    """Return name and reason of each package that was not audited."""
    return [(one["name"], one["skip_reason"]) for one in audited if "skip_reason" in one and one["name"] != OURS]


def vulnerable(audited: Sequence[Document], accepted: Document, today: date) -> list[str]:
    problems = []
    for package in audited:
        for found in package.get("vulns", []):
            names = [found["id"], *found.get("aliases", [])]
            entry = next((accepted[name] for name in names if name in accepted), None)
            what = f"{package['name']} {package.get('version')} has {' = '.join(names)}"
            fixed = ", ".join(found.get("fix_versions", [])) or "no version"
            if entry is None:
                problems.append(f"{what}; fixed in {fixed}")
            elif entry["until"] < today:
                problems.append(f"{what}, let pass until {entry['until']}: {entry['reason']}; fixed in {fixed}")
    return problems


# Licenses


def found_licenses() -> dict[str, str]:
    """Return licenses by package, from its metadata."""
    command = [str(BESIDE / "pip-licenses"), "--format=json", "--with-system", f"--python={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {normal(one["Name"]): str(one["License"]) for one in json.loads(done.stdout)}
    found.pop(OURS, None)
    return found


def unlicensed(licenses: Mapping[str, str], known: Document) -> list[str]:
    problems = []
    for package, license in sorted(licenses.items()):
        own = known["packages"].get(package)
        unknown = [part for part in parts(license) if part not in known["licenses"]]
        if unknown and (own is None or own["license"] != license):
            problems.append(f"{package} has the license {license!r}, which requirements/licenses.toml does not know")
    return problems


def parts(license: str) -> list[str]:
    """Split an SPDX expression, or several classifiers; every part must be a known license."""
    found: list[str] = []
    for one in license.split(";"):
        expression = re.split(r" AND | OR ", one)
        found += [part.strip(" ()") for part in expression] if len(expression) > 1 else [one.strip()]
    return found


def license_table(licenses: Mapping[str, str]) -> str:
    versions = installed()
    rows = [f"| {package} | {versions.get(package, '')} | {license} |" for package, license in sorted(licenses.items())]
    return "\n".join(["# Licenses", "", "| Package | Version | License |", "|---|---|---|", *rows, ""])


# Bill of materials


def bill_of_materials(path: Path) -> Document:
    """Write the packages of this environment and their dependencies; the output is reproducible."""
    command = [str(BESIDE / "cyclonedx-py"), "environment", "--output-reproducible", "--no-validate"]
    command += ["--pyproject", str(HERE.parent / "pyproject.toml"), "--output-file", str(path), sys.executable]
    subprocess.run(command, capture_output=True, check=True)
    bill: Document = json.loads(path.read_text(encoding="utf-8"))
    return bill


def missing(bill: Document, packages: Mapping[str, str]) -> list[str]:
    listed = {normal(one["name"]): one.get("version") for one in bill["components"]}
    return [
        f"the bill of materials does not list {name} {version}"
        for name, version in sorted(packages.items())
        if listed.get(name) != version
    ]


# Wheels


def without_wheel(name: str, platform: str) -> list[str]:
    """Resolve a hashed list for another platform from wheels alone; return the problem, if any."""
    command = [str(BESIDE / "uv"), "--quiet", "pip", "install", "--dry-run", "--target", str(BUILD / platform)]
    command += ["--python-version", "3.11", "--python-platform", platform, "--only-binary", ":all:"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(HERE / name)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 2, "", "the package index did not answer")
    if done.returncode and "has no wheels" not in done.stderr:
        print(f"WARNING: wheels for {platform} were NOT checked ({' '.join(done.stderr.split())[:200]})")
        return []
    return [f"for {platform}, {' '.join(done.stderr.split())}"] if done.returncode else []


if __name__ == "__main__":
    main()
