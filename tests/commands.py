"""Command ``kith`` called as a function, without the two seconds that a process needs for imports.

Tests of signals, streams and long-running servers use a real process.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from service.cli.main import main


def run_kith(
    *words: str, cwd: Path, environment: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Return what ``subprocess.run`` would return for the command."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment, clear=True),
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        patched.chdir(cwd)
        patched.setattr(sys, "argv", ["kith", *words])
        patched.setattr(sys, "stdin", io.StringIO(stdin))
        patched.setattr(sys.modules["__main__"], "__package__", None)  # so that the program is named by argv
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(words, ended.value.code, stdout.getvalue(), stderr.getvalue())
