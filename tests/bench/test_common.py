"""Shared benchmark code has few imports and reports missing packages."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_a_page_of_routes_does_not_wait_for_torch() -> None:
    told = "import sys, tools.rest_reference; print(sorted({'torch', 'training'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
