"""Master keys held by an external program, such as a client of a KMS or an HSM.

The program is started once per request. It reads one JSON object from standard input and writes one to standard output:

- ``{"do": "id"}``: ``{"id": "..."}``, the key for new data, at most 64 characters;
- ``{"do": "wrap", "id": "...", "key": BASE64, "purpose": "..."}``: ``{"wrapped": BASE64}``;
- ``{"do": "unwrap", "id": "...", "wrapped": BASE64, "purpose": "..."}``: ``{"key": BASE64}``.

``purpose`` is authenticated with the key (AWS: encryption context). ``{"refused": "why"}`` reports an unknown key or an
altered wrapped key. Any other outcome, including none within TIMEOUT_S, counts as temporarily unavailable. Standard
error is copied to the log.
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

from kith.wire.identifiers import FORBIDDEN_PATTERN
from service.core.errors import MasterKeyError, MasterKeyUnavailableError
from service.security.sealing import KEY_BYTES

TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 2.0
"""Requests fail immediately for this long after a failure, instead of queueing."""
MAX_WRAPPED_BYTES: Final = 8192
MAX_ID_LENGTH: Final = 64
MAX_LOGGED_LENGTH: Final = 2000
log = logging.getLogger(__name__)


class KeyCommand:
    """Client of the external program.

    ``arguments``: program and arguments, run without a shell. Thread-safe; runs one request at a time.
    """

    def __init__(self, arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self._arguments, self._timeout_s = list(arguments), timeout_s
        self.place = f"the program {arguments[0]}"
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._why = ""

    def first(self) -> CommandKey:
        said = self.ask({"do": "id"}).get("id")
        if not isinstance(said, str) or not 0 < len(said) <= MAX_ID_LENGTH or FORBIDDEN_PATTERN.search(said):
            raise MasterKeyError(
                f"{self.place} returned the key id {said!r:.100}; an id has 1 to {MAX_ID_LENGTH} characters"
            )
        return CommandKey(self, said)

    def find(self, key_id: str) -> CommandKey:
        return CommandKey(self, key_id)

    def ids(self) -> list[str]:
        return [self.first().id]

    def ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """Raises MasterKeyUnavailableError; MasterKeyError if the program refuses."""
        with self._lock:
            if time.monotonic() < self._retry_at:
                raise MasterKeyUnavailableError(self._why)
            try:
                answer = self._run(request)
            except MasterKeyUnavailableError as error:
                self._why, self._retry_at = error.detail, time.monotonic() + PAUSE_S
                raise
        if "refused" in answer:
            raise MasterKeyError(f"{self.place} refuses: {str(answer['refused'])[:MAX_LOGGED_LENGTH]}")
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
                with suppress(ProcessLookupError):  # including its child processes
                    os.killpg(program.pid, signal.SIGKILL)
        self._log(logged)
        if program.returncode:
            raise MasterKeyUnavailableError(
                f"{self.place} exited with status {program.returncode}; see the log for its error output"
            )
        try:
            answer = json.loads(said)
        except ValueError as error:
            raise MasterKeyUnavailableError(f"{self.place} returned invalid JSON") from error
        if not isinstance(answer, dict):
            raise MasterKeyUnavailableError(f"{self.place} returned JSON that is not an object")
        return answer

    def _log(self, said: bytes | None) -> None:
        if said:
            log.warning("%s: %s", self.place, said[:MAX_LOGGED_LENGTH].decode(errors="replace").strip())


class CommandKey:
    """One key of an external program."""

    def __init__(self, command: KeyCommand, key_id: str) -> None:
        self._command, self.id = command, key_id

    def wrap(self, key: bytes, purpose: str) -> bytes:
        request = {"do": "wrap", "id": self.id, "key": base64.b64encode(key).decode(), "purpose": purpose}
        wrapped = self._bytes(request, "wrapped")
        if not 0 < len(wrapped) <= MAX_WRAPPED_BYTES or key in wrapped:
            raise MasterKeyError(f"{self._command.place} returned {len(wrapped)} bytes, which cannot be a wrapped key")
        return wrapped

    def unwrap(self, wrapped: bytes, purpose: str) -> bytes:
        request = {"do": "unwrap", "id": self.id, "wrapped": base64.b64encode(wrapped).decode(), "purpose": purpose}
        key = self._bytes(request, "key")
        if len(key) != KEY_BYTES:
            raise MasterKeyError(f"{self._command.place} returned a key of {len(key)} bytes instead of {KEY_BYTES}")
        return key

    def _bytes(self, request: Mapping[str, str], name: str) -> bytes:
        answer = self._command.ask(request).get(name)
        try:
            return base64.b64decode(answer, validate=True)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise MasterKeyError(f"{self._command.place} returned no base64 value {name!r}") from error
