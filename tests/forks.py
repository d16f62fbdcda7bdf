"""Processes forked in milliseconds from one that has imported what they need, and has no threads: forks of the test's
own process may hang, or end.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

CONTEXT: Final = multiprocessing.get_context("forkserver")
# One list for all: the first process that is started reads it.
CONTEXT.set_forkserver_preload(["tests.faults.test_kills", "training.run.train"])
