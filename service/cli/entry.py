"""Console script ``kith``: Ctrl-C during the imports ends the process without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command line with the default SIGINT action, then run it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell may have set SIGINT to be ignored: keep that
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from service.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
