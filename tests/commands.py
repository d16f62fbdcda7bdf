"""``kith`` as a function: what it answers and its status, without the two seconds in which a process imports it.

What is about signals, streams, completion by the script's name, or a server that goes on is tested in a real process.
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

from service.cli import main


def called(*words: str, cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of the words, with nothing to read from, would return it."""
    out, said = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment, clear=True),
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(out),
        redirect_stderr(said),
    ):
        patched.chdir(cwd)
        patched.setattr(sys, "argv", ["kith", *words])
        patched.setattr(sys, "stdin", io.StringIO())
        patched.setattr(sys.modules["__main__"], "__package__", None)  # a script's, whose name is argv's
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(words, ended.value.code, out.getvalue(), said.getvalue())
