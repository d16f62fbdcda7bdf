"""Describe the machine and the commit that figures were taken on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Final

from models.runtime.onnx_runtime import available_cores

CPU_INFO: Final = Path("/proc/cpuinfo")
TOLD: Final = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512_vnni": "AVX-512 VNNI", "avx2": "AVX2"}
"""CPU flags that matter for numeric formats."""


def about() -> dict[str, str]:
    """Return day, commit and machine of figures."""
    return {"date": date.today().isoformat(), "commit": commit(), "machine": machine()}


def in_words(figures: Mapping[str, str]) -> str:
    """Format the fields of `about`."""
    return f"{figures['machine']}, commit {figures['commit']}, {figures['date']}"


def machine() -> str:
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [word for flag, word in TOLD.items() if flag in told.get("flags", "").split()]
    words = [told.get("model name", platform.machine()), f"{available_cores()} cores", " ".join(flags)]
    return ", ".join(word for word in words if word)


def commit() -> str:
    """Return the checkout's commit, with a plus if code or packs differ from it; *unknown* outside of a checkout."""
    commands = (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--", "*.py", "models"])
    run = partial(subprocess.run, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    try:
        head, changed = (run(["git", *command]).stdout.strip() for command in commands)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{'+' if changed else ''}"
