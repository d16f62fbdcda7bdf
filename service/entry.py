"""The script ``kith``: what it runs is imported where Ctrl-C ends a program as it ends any other, without a word."""

from __future__ import annotations

import signal


def main() -> None:
    """As :func:`service.cli.main`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have had it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from service.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
