"""A master key that never comes here: a program wraps and unwraps for us, by whatever holds the key (a KMS, an HSM).

It is started for each request, is given one JSON object on its standard input, and answers with one on its output:

- ``{"do": "id"}``: ``{"id": "..."}``, the key meant for what is new; at most 64 characters;
- ``{"do": "wrap", "id": "...", "key": BASE64, "purpose": "..."}``: ``{"wrapped": BASE64}``;
- ``{"do": "unwrap", "id": "...", "wrapped": BASE64, "purpose": "..."}``: ``{"key": BASE64}``.

``purpose`` is to be authenticated with the key (AWS calls that the encryption context). ``{"refused": "why"}`` says
that there is no such key, or that what was wrapped was altered. Any other end, and none within TIMEOUT_S, means that it
cannot be asked at the moment. What it writes to its standard error goes to the log.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from service.core.errors import MasterKeyError, MasterKeyUnavailableError
from service.security.sealing import KEY_BYTES

TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 2.0
"""After it could not be asked, before it is asked again: requests do not queue up behind it."""
MOST_WRAPPED_BYTES: Final = 8192
ID_LENGTH: Final = 64
LOGGED: Final = 2000
log = logging.getLogger(__name__)


class KeyCommand:
    """``arguments``: the program and what it is given; no shell reads them. Safe to share between threads: one request
    at a time."""

    def __init__(self, arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self._arguments, self._timeout_s = list(arguments), timeout_s
        self.place = f"the program {arguments[0]}"
        self._turn = threading.Lock()
        self._away_until = 0.0
        self._why = ""

    def first(self) -> CommandKey:
        said = self.ask({"do": "id"}).get("id")
        if not isinstance(said, str) or not 0 < len(said) <= ID_LENGTH or not said.isprintable():
            raise MasterKeyError(f"{self.place} names its key by 1 to {ID_LENGTH} characters, not by {said!r:.100}")
        return CommandKey(self, said)

    def find(self, key_id: str) -> CommandKey:
        return CommandKey(self, key_id)

    def ids(self) -> list[str]:
        return [self.first().id]

    def ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """Raises MasterKeyUnavailableError; MasterKeyError: it refuses."""
        with self._turn:
            if time.monotonic() < self._away_until:
                raise MasterKeyUnavailableError(self._why)
            try:
                answer = self._run(request)
            except MasterKeyUnavailableError as error:
                self._why, self._away_until = error.detail, time.monotonic() + PAUSE_S
                raise
        if "refused" in answer:
            raise MasterKeyError(f"{self.place} refuses: {str(answer['refused'])[:LOGGED]}")
        return answer

    def _run(self, request: Mapping[str, str]) -> dict[str, Any]:
        try:
            program = subprocess.Popen(  # noqa: S603 - the operator's own program
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise MasterKeyUnavailableError(f"{self.place} cannot be started: {error.strerror}") from error
        with program:
            try:
                said, logged = program.communicate(json.dumps(request).encode(), self._timeout_s)
            except subprocess.TimeoutExpired as error:
                self._log(error.stderr)
                raise MasterKeyUnavailableError(f"{self.place} did not answer within {self._timeout_s:g} s") from error
            finally:
                with suppress(ProcessLookupError):  # with whatever it has started
                    os.killpg(program.pid, signal.SIGKILL)
        self._log(logged)
        if program.returncode:
            raise MasterKeyUnavailableError(
                f"{self.place} ended with status {program.returncode}; the log has what it said"
            )
        try:
            answer = json.loads(said)
        except ValueError as error:
            raise MasterKeyUnavailableError(f"{self.place} answered with something that is no JSON") from error
        if not isinstance(answer, dict):
            raise MasterKeyUnavailableError(f"{self.place} answered with something that is no object")
        return answer

    def _log(self, said: bytes | None) -> None:
        if said:
            log.warning("%s: %s", self.place, said[:LOGGED].decode(errors="replace").strip())


class CommandKey:
    """One of the keys that a program can ask for."""

    def __init__(self, command: KeyCommand, key_id: str) -> None:
        self._command, self.id = command, key_id

    def wrap(self, key: bytes, purpose: str) -> bytes:
        request = {"do": "wrap", "id": self.id, "key": base64.b64encode(key).decode(), "purpose": purpose}
        wrapped = self._bytes(request, "wrapped")
        if not 0 < len(wrapped) <= MOST_WRAPPED_BYTES or key in wrapped:
            raise MasterKeyError(f"{self._command.place} did not wrap a key: it answered with {len(wrapped)} bytes")
        return wrapped

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        request = {"do": "unwrap", "id": self.id, "wrapped": base64.b64encode(wrapped).decode(), "purpose": purpose}
        key = self._bytes(request, "key")
        if len(key) != KEY_BYTES:
            raise MasterKeyError(f"{self._command.place} unwrapped {len(key)} bytes, a key has {KEY_BYTES}")
        return key

    def _bytes(self, request: Mapping[str, str], name: str) -> bytes:
        answer = self._command.ask(request).get(name)
        try:
            return base64.b64decode(answer, validate=True)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise MasterKeyError(f"{self._command.place} answered without {name!r} in base64") from error
