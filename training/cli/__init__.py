"""Command line of training, ``kith-train``."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from typing import Final, NoReturn

from rich.console import Console
from rich.markup import escape

from models.errors import ModelError
from training.config import ConfigError
from training.errors import RunError

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for exporter in ("onnx_ir", "onnxscript"):  # they log every optimization pass
        logging.getLogger(exporter).setLevel("WARNING")
    threading.excepthook = _report_thread
    try:
        _run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: taking down torch and its threads can take seconds after the last line


def _run() -> None:
    try:
        from training.cli.commands import app  # torch: an error while it is imported is reported, too

        app()
    except (ConfigError, ModelError, RunError) as error:
        _fail(str(error), error.exit_code if isinstance(error, RunError) else 2)
    except OSError as error:  # of the machine: a full disk, a folder without permission
        file = f"{error.filename}: " if error.filename else ""
        space = "Free space on the disk, then run the command again; a run resumes from its last checkpoint"
        remedy = space if error.errno in FULL_DISK else "Correct it, then run the command again"
        _fail(f"{file}{error.strerror or error}. {remedy}", 2)


def _report_thread(error: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, except for a full disk: TensorBoard's thread raises it in the main thread, too."""
    if not (isinstance(error.exc_value, OSError) and error.exc_value.errno in FULL_DISK):
        threading.__excepthook__(error)


def _fail(message: str, exit_code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(message)}", highlight=False)
    raise SystemExit(exit_code)
