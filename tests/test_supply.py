"""Installed packages are pinned, hashed, licensed and listed, and the checks detect violations."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from requirements import check
from tests.conftest import ROOT

FILES = {
    "serve": ["cpu"],
    "cpu": ["cpu", "postgres", "mqtt"],
    "cpu-all": ["cpu", "postgres", "mqtt", "milvus"],
    "gpu": ["gpu", "postgres", "mqtt"],
    "gpu-all": ["gpu", "postgres", "mqtt", "milvus"],
    "dev": ["cpu", "postgres", "milvus", "mqtt", "training", "demo", "dev"],
}
"""Extras of each file in requirements/."""
OTHER_RUNTIMES = ({"onnxruntime-gpu", "faiss-gpu", "opencv-python"}, {"onnxruntime", "openvino", "faiss-cpu"})
"""Packages that no file for the CPU, or for the GPU, has (docs/decisions.md, 2)."""
WITHOUT_HASH = {"torch", "jinja2", "fsspec", "insightface"}
"""Packages without hashes: torch differs by machine and determines the next two; insightface is installed without its
dependencies.
"""


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by package."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    found = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)(.*)$", text, re.MULTILINE)
    assert len(found) == len(text.splitlines()), "nothing else, such as a place of this machine"
    return {
        check.normal(package): (version, re.findall(r"--hash=sha256:([0-9a-f]{64})", rest))
        for package, version, rest in found
    }


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {check.normal(package): version for package, _, version in (line.partition("==") for line in lines)}


def project() -> dict[str, list[Requirement]]:
    """Return the requirements by extra; "" is the required ones."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": document["dependencies"], **document["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}


def test_the_lists_are_those_of_the_project() -> None:
    """Run make lock if this fails."""
    pinned, everywhere = constraints(), dict[str, tuple[str, list[str]]]()
    for name, extras in FILES.items():
        lines = locked(name)
        everywhere |= lines
        assert not lines.keys() & OTHER_RUNTIMES["gpu" in name], "one would overwrite the other"
        assert all(hashes for _, hashes in lines.values())
        assert {package for package, (version, _) in lines.items() if pinned.get(package, version) != version} == set()
        for requirement in (one for extra in ("", *extras) for one in project()[extra]):
            package = check.normal(requirement.name)
            version = pinned[package] if package in WITHOUT_HASH else lines[package][0]
            assert requirement.specifier.contains(version), requirement
    # Where Kith serves there is no torch, and jinja2 comes from the index like all else.
    assert pinned.keys() - everywhere.keys() == WITHOUT_HASH - {"jinja2"}
    assert {check.normal(one.name) for requirements in project().values() for one in requirements} <= pinned.keys()
    known = locked("dev").keys() | pinned.keys()
    here = (known & check.installed().keys()) - WITHOUT_HASH
    needs = [Requirement(line) for package in here for line in requires(package) or []]
    needed = {check.normal(one.name) for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert needed - known == set(), "what the packages need is in the lists, too"


def test_the_image_is_built_from_hashes_alone() -> None:
    """Only Kith itself is installed without a hash, and its build requirements have hashes."""
    texts = [(ROOT / "docker" / name).read_text().replace("\\\n", "") for name in ("Dockerfile", "install")]
    commands = [command for text in texts for command in re.split(r"\n|&&", text)]
    installs = [command.rstrip() for command in commands if re.search(r"pip\b.* install ", command)]
    assert len(installs) == 3
    own = [line for line in installs if "--require-hashes" not in line]
    assert ["--no-build-isolation" in line and line.endswith(" .") for line in own] == [True]
    assert all("--no-deps" in line for line in installs)
    (asked,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lines = locked("build")
    assert lines.keys() == {Requirement(asked).name}
    assert Requirement(asked).specifier.contains(lines["setuptools"][0])
    assert all(hashes for _, hashes in lines.values())


def test_a_vulnerability_is_a_problem_until_it_is_let_pass_and_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    audited: list[check.Document] = [
        {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}]},
        {"name": "b", "version": "1", "vulns": []},
        {"name": "kith-face", "skip_reason": "editable"},
        {"name": "c", "skip_reason": "not found"},
    ]
    entry = {"CVE-1": {"reason": "not reached", "until": date(2026, 12, 31)}}
    (problem,) = check.vulnerable(audited, {}, date(2026, 12, 31))
    assert problem == "a 1 has PYSEC-1 = CVE-1; fixed in 2"
    assert check.vulnerable(audited, entry, date(2026, 12, 31)) == []
    (late,) = check.vulnerable(audited, entry, date(2027, 1, 1))
    assert "let pass until 2026-12-31: not reached" in late
    assert check.not_audited(audited) == [("c", "not found")]
    for name, passing in check.read("vulnerabilities.toml").items():
        assert passing["reason"] and isinstance(passing["until"], date), name
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    unreachable = check.audit("--cache-dir", str(tmp_path))
    assert {name for name, _ in check.not_audited(unreachable)} == check.installed().keys()


def test_licenses_are_known() -> None:
    licenses, known = check.found_licenses(), check.read("licenses.toml")
    assert licenses.keys() == check.installed().keys()
    assert check.unlicensed(licenses, known) == []
    assert all(entry["reason"] for entry in known["packages"].values())
    for new in ("GPL-3.0-only", "MIT AND GPL-3.0-only", "MIT License; GNU General Public License (GPL)", "UNKNOWN"):
        (problem,) = check.unlicensed({"a": new}, known)
        assert problem.startswith("a has the license")
    (changed,) = check.unlicensed({"psycopg": "AGPL-3.0-only"}, known)
    assert "AGPL" in changed


def test_a_package_without_a_wheel_for_a_platform_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    problems = check.without_wheel("serve.txt", "aarch64-manylinux_2_17")
    if "NOT checked" in capsys.readouterr().out:
        pytest.skip("the package index cannot be reached")
    assert ["has no wheels with a matching platform tag" in problem for problem in problems] == [True]
    assert check.without_wheel("serve.txt", check.AARCH64) == []


def test_the_bill_lists_all_that_is_installed(tmp_path: Path) -> None:
    bill = check.bill_of_materials(tmp_path / "sbom.json")
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "kith-face"
    assert check.missing(bill, check.installed()) == []
    assert all(one["purl"].startswith("pkg:pypi/") for one in bill["components"])
    root = next(one for one in bill["dependencies"] if one["ref"] == "root-component")
    assert len(root["dependsOn"]) > 20, "what depends on what"
    assert str(ROOT) not in (tmp_path / "sbom.json").read_text()
    assert check.missing(bill, {"numpy": "0"}) == ["the bill of materials does not list numpy 0"]
