"""A server brings along what it needs, and no more."""

from __future__ import annotations

import subprocess
import sys

SELDOM = ("matplotlib", "onnx", "plotext", "pyarrow", "scipy.optimize", "torch")
"""Large, and needed by few servers: they are imported where they are used."""


def test_what_few_servers_need_is_not_imported_by_all() -> None:
    program = f"import service.cli, service.server, sys; print([name for name in {SELDOM} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
