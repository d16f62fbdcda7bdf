"""The files in docker/ for Compose, Kubernetes, HAProxy and systemd are valid, hardened, and set existing settings
only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from configparser import ConfigParser
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.core.errors import KithError
from service.server import MAX_CONNECTIONS
from service.settings import Settings, load_settings
from tests.conftest import ROOT

DOCKER = ROOT / "docker"
COMPOSE = ["compose.yaml", "compose.mqtt.yaml", "compose.scale.yaml"]
KUBERNETES = ["one", "scale", "gpu"]
SETTINGS = {f"KITH_{name.upper()}" for name in Settings.model_fields}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
GIVEN = "x" * 32
"""Placeholder for values that the operator chooses."""
STYLE = (
    "{extends: default, rules: {document-start: disable, line-length: {max: 130}, braces: {max-spaces-inside: 0}, "
    "octal-values: disable}}"
)
Document = dict[str, Any]


def compose(name: str) -> Document:
    document: Document = yaml.safe_load((DOCKER / name).read_text())
    return document


def manifests(folder: str) -> list[Document]:
    """Combine the manifests like kustomize, for the few features that the files use: patches add (RFC 6902)."""
    here = DOCKER / "kubernetes" / folder
    kustomization = yaml.safe_load((here / "kustomization.yaml").read_text())
    found: list[Document] = []
    for resource in kustomization["resources"]:
        place = (here / resource).resolve()
        found += manifests(place.name) if place.is_dir() else yaml.safe_load_all(place.read_text())
    for patch in kustomization.get("patches", []):
        for operation in yaml.safe_load((here / patch["path"]).read_text()):
            target: Any
            (target,) = [each for each in found if each["kind"] == patch["target"]["kind"]]
            *way, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
            for part in way:
                target = target[int(part) if isinstance(target, list) else part]
            assert operation["op"] == "add"
            if last == "-":
                target.append(operation["value"])
            else:
                target[last] = operation["value"]
    return found


def run(*command: str, cwd: Path = ROOT, given: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    environment = os.environ | given
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=100)


def test_files_are_well_written() -> None:
    files = [str(DOCKER / name) for name in COMPOSE]
    schema = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    assert schema.returncode == 0, schema.stdout
    lint = run(sys.executable, "-m", "yamllint", "--strict", "-d", STYLE, str(DOCKER / "kubernetes"), *files)
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize("name", COMPOSE)
def test_what_compose_starts_is_closed_and_sets_what_exists(name: str) -> None:
    document, nodes = compose(name), 0
    proxied = set(re.findall(r"\bKITH_\w+", (DOCKER / "haproxy.cfg").read_text()))
    for service, is_set in document["services"].items():
        pinned = re.search(r":\D*\d+\.\d+\.\d+|:\d+\.\d+$|:RELEASE\.", is_set["image"])
        assert is_set["image"] in ("kith:cpu", "kith:cpu-all") or pinned
        assert is_set["restart"], service
        if is_set["restart"] != "no":
            assert is_set["deploy"]["resources"]["limits"]["memory"], service
        if is_set["image"].startswith(("kith:", "haproxy:")):
            assert is_set["read_only"] is True
            assert is_set["cap_drop"] == ["ALL"]
        assert is_set["security_opt"], service
        for published in is_set.get("ports", []):
            assert published.startswith("127.0.0.1:"), "reached by others through TLS alone"
        if "KITH_MASTER_KEY_FILE" in is_set.get("environment", {}):
            accepted(is_set["environment"])
            nodes += 1
        if is_set["image"].startswith("haproxy"):
            assert set(is_set["environment"]) <= proxied
            assert is_set["environment"]["KITH_REQUESTS_PER_MINUTE"] is None, "as in docker/.env; no limit without it"
        networks = is_set.get("networks", {})
        for network, place in networks.items() if isinstance(networks, dict) else ():
            (pool,) = document["networks"][network]["ipam"]["config"]
            fixed = ip_address(place["ipv4_address"])
            assert fixed in ip_network(pool["subnet"]) and fixed not in ip_network(pool["ip_range"])
    assert nodes


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_needs_the_secrets_to_start_and_for_no_other_command(name: str, tmp_path: Path) -> None:
    """A variable that Compose requires is required by down and logs, too. The first container requires it instead."""
    asked = re.findall(r"(?<!\$)\$\{(\w+)([^}]*)\}", (DOCKER / name).read_text())
    assert {otherwise for _, otherwise in asked} == {":-"}
    services = compose(name)["services"]
    secrets = dict.fromkeys([secret for secret, _ in asked], GIVEN)
    assert services["key"]["environment"] == {secret: f"${{{secret}:-}}" for secret in secrets}
    for service, is_set in services.items():
        if service != "key" and secrets.keys() & set(re.findall(r"\$\{(\w+)", str(is_set.get("environment")))):
            waits_for = set(is_set["depends_on"])
            assert "key" in waits_for.union(*(services[each].get("depends_on", ()) for each in waits_for)), service
    shell, option, script = services["key"]["command"]
    script = script.replace("$$", "$").replace("/keys/", f"{tmp_path}/")
    for secret in secrets:
        done = run(shell, option, script, given={**secrets, secret: ""})
        assert done.returncode != 0
        assert f"{secret}: is not set: see docs/deployment.md" in done.stderr
    assert not (tmp_path / "master.key").exists()
    keys = set()
    for _ in range(2):
        assert run(shell, option, script, given=secrets).returncode == 0
        keys.add((tmp_path / "master.key").read_bytes())
    assert len(keys) == 1


PROGRAMS = """
docker() { if [[ " $* " == *" sh -c "* ]]; then sh -c "${@: -1}"; fi; }
install() { mkdir -p "${@: -1}"; }
kubectl() { :; }
python3() { :; }
/opt/kith/bin/pip() { :; }
systemctl() { :; }
"""


def test_commands_with_keys_keep_them_from_git_from_others_and_when_repeated(tmp_path: Path) -> None:
    assert {".env", "master.key"} <= set((ROOT / ".gitignore").read_text().split())
    told = "".join((ROOT / name).read_text() for name in ("README.md", "docs/deployment.md"))
    writing = re.compile(r">\S*(\.env|\.key)\b")
    blocks = [each for each in re.findall(r"```sh\n(.*?)```", told, re.DOTALL) if writing.search(each)]
    assert len(blocks) >= 4
    (given := tmp_path / "given").write_text(GIVEN)
    for number, block in enumerate(blocks):
        here = tmp_path / str(number)
        for folder in ("docker", "keys", "data"):
            (here / folder).mkdir(parents=True)
        block = re.sub(r"(?<=[\s>])/(etc|keys|data)/", rf"{here}/\1/", block)
        block = re.sub(r"<(master\.key|kith\.backup)", f"<{given}", block)
        kept = []
        for _ in range(2):
            done = run("bash", "-euc", PROGRAMS + block, cwd=here)
            assert done.returncode == 0, block + done.stderr
            kept.append({path: path.read_bytes() for path in here.rglob("*") if path.is_file()})
        assert kept[0] == kept[1] and all(kept[0].values()), block
        assert {path.stat().st_mode & 0o777 for path in kept[0]} == {0o600}, block
        assert all(path.suffix in (".key", ".backup") or path.name.endswith(".env") for path in kept[0])


def accepted(environment: dict[str, Any]) -> None:
    """Check that the service accepts the settings, with placeholders for the operator's values."""
    chosen = {key: re.sub(r"\$\{[^}]*\}", GIVEN, str(value)) for key, value in environment.items()}
    assert chosen.keys() <= SETTINGS
    load_settings(**{key.removeprefix("KITH_").lower(): value for key, value in chosen.items()})


@pytest.mark.parametrize("folder", KUBERNETES)
def test_manifests_fit_their_schemas_and_pods_are_closed(folder: str) -> None:
    documents = manifests(folder)
    assert {"Service", "StatefulSet", "NetworkPolicy"} <= {each["kind"] for each in documents}
    for each in documents:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        assert each["metadata"]["labels"] == {"app.kubernetes.io/name": "kith"}
    kustomization = yaml.safe_load((DOCKER / "kubernetes" / folder / "kustomization.yaml").read_text())
    assert {image.get("newTag", VERSION) for image in kustomization.get("images", ())} <= {VERSION}
    (pod,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "StatefulSet"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    closed = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == closed
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert container["resources"]["limits"]["memory"]
    (key,) = [each for each in pod["volumes"] if each["name"] == "master-key"]
    assert key["secret"]["defaultMode"] == 0o400
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert str(Path(plain["KITH_MASTER_KEY_FILE"]).parent) in mounted >= {"/data", "/tmp"}  # noqa: S108
    secret = {
        each["name"]: "postgresql://kith@postgres.example.org/kith" for each in container["env"] if "valueFrom" in each
    }
    accepted(plain | secret)
    assert (container["resources"]["limits"].get("nvidia.com/gpu") == 1) == (folder == "gpu")


def test_errors_of_the_proxy_are_like_the_services() -> None:
    text = (DOCKER / "haproxy.cfg").read_text()
    (most,) = re.findall(r"default-server maxconn (\d+)", text)
    assert int(most) < MAX_CONNECTIONS
    told = re.findall(r"status (\d+) content-type application/problem\+json string '(.*)'", text)
    assert {status for status, _ in told} == {"400", "408", "429", "502", "503", "504"}
    table = (ROOT / "docs" / "deployment.md").read_text()
    for status, problem in told:
        document = json.loads(problem)
        assert document.keys() == KithError("").document().keys()
        assert document["status"] == int(status)
        assert document["type"] == f"urn:kith:error:{document['code']}"
        assert f"{status} `{document['code']}`" in table


def test_systemd_runs_all_with_one_user_and_with_settings_that_exist() -> None:
    places = [DOCKER / name for name in ("kith.service", "kith-backup.service", "kith-backup.timer")]
    assert set(re.findall(r"\bKITH_\w+", "".join(place.read_text() for place in places))) <= SETTINGS
    if shutil.which("systemd-analyze") is not None:
        said = run("systemd-analyze", "verify", *map(str, places)).stderr.splitlines()
        assert [line for line in said if "is not executable" not in line] == [], "the program is not there yet"
    service, backup = map(directives, places[:2])
    own = {"ExecStart", "Type", "Restart", "TimeoutStopSec"}
    assert {pair for pair in service.items() ^ backup.items() if pair[0] not in own} == set()
    page = (ROOT / "docs" / "deployment.md").read_text()
    recipe = page[page.index("kith_here() {") : page.index("kith_here keys create")]
    given = dict(re.findall(r"--property=(\w+)=(\S+)", recipe))
    assert {"DynamicUser", "User", "StateDirectory", "EnvironmentFile", "LoadCredential"} <= given.keys()
    assert given.items() <= service.items()
    variables = service["Environment"].replace("%d", "/run/credentials/kith-command.service")
    assert sorted(re.findall(r"--setenv=(\S+)", recipe)) == sorted(variables.split())


def directives(place: Path) -> dict[str, str]:
    """Return the section Service of a unit."""
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(place)
    return dict(parser["Service"])


def test_the_image_has_every_package_that_serving_imports() -> None:
    dockerfile, context = ((ROOT / name).read_text() for name in ("docker/Dockerfile", ".dockerignore"))
    assert set(re.findall(r"\bKITH_\w+", dockerfile)) <= SETTINGS
    for package in ("kith", "models", "service"):
        assert f"\nCOPY {package} {package}\n" in dockerfile
        assert f"\n!{package}\n" in context
