"""Print the size of an image: its layers, and its heaviest packages. Needs podman."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Final

HEAVIEST: Final = 14
LISTING: Final = """
import json, os, sysconfig
top = sysconfig.get_path("purelib")
print(json.dumps([
    (os.path.relpath(folder, top).split("/")[0], name, os.lstat(os.path.join(folder, name)).st_size)
    for folder, _, names in os.walk(top) for name in names
]))
"""
COMPILED: Final = "Python's compiled files (of all)"


def main() -> None:
    (image,) = sys.argv[1:]
    layers = json.loads(podman("history", "--format", "json", image))
    kept = [(layer["size"], layer["CreatedBy"]) for layer in layers if layer["size"] > 10_000]
    print(f"{image}: {sum(size for size, _ in kept) / 1e6:,.0f} MB\n\n| Layer | MB |\n|---|---|")
    for size, made_by in reversed(kept):
        print(f"| {named(made_by)} | {size / 1e6:,.1f} |")
    print("\n| Installed | MB |\n|---|---|")
    for name, size in installed(image).most_common(HEAVIEST):
        print(f"| {name} | {size / 1e6:,.0f} |")


def named(made_by: str) -> str:
    if "/opt/kith" in made_by or "COPY" in made_by:
        return "Kith and its packs" if "/opt/kith/code" in made_by else "packages"
    return "base"


def installed(image: str) -> Counter[str]:
    """Return bytes by package, including its shared libraries; compiled bytecode is counted separately."""
    sizes: Counter[str] = Counter()
    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
    for top, file, size in json.loads(podman("run", "--rm", *limits, image, "python3", "-c", LISTING)):
        sizes[COMPILED if file.endswith(".pyc") else top.removesuffix(".libs")] += size
    return sizes


def podman(*arguments: str) -> str:
    return subprocess.run(
        ["podman", "--runtime", "runc", *arguments], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
