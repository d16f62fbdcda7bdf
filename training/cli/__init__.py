"""Command line of training, ``kith-train``."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from models.errors import ModelError
from training.cli import light
from training.config import ConfigError
from training.errors import RunError


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for exporter in ("onnx_ir", "onnxscript"):  # they log every optimization pass
        logging.getLogger(exporter).setLevel("WARNING")
    try:
        if set(sys.argv[1:2]) & {command.name for command in light.app.registered_commands}:
            light.app()
        else:
            from training.cli.commands import app

            app()
    except (ConfigError, ModelError, RunError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(error.exit_code if isinstance(error, RunError) else 2) from error
