"""Hash chain of audit lines, and its verification: finds the first line that differs from what was written. Pure.

The hash of a line is SHA-256 over the previous hash and the line as JSON with sorted keys, so altering, removing or
inserting a line breaks the chain there. Truncating a chain, or rewriting it from some line on, leaves it consistent in
itself. The head's MAC reveals that to a holder of the service's secret; an anchor stored elsewhere reveals it to
everyone. The service's chain proves which chains exist: it names each chain by the hash of its first line, which stays
the same when a gallery's key changes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, Literal

BEFORE_ALL: Final = "0" * 64
OF_SERVICE: Final = 0
"""Key of the service's chain: operations outside galleries, and the list of all galleries."""
SERVICE: Final = "service"
"""Name of the service's chain. Other chains are named by the hash of their first line."""
BEGINS: Final = "gallery_created"
"""Event in the service's chain that records the start of another chain."""
ENDS: Final = "gallery_deleted"
"""Event in the service's chain that records the end of another chain."""

Kind = Literal[
    "unreadable", "altered", "missing", "cut", "head", "mac", "chain_missing", "chain_unknown", "gallery", "anchor"
]


@dataclass(frozen=True)
class Line:
    """One operation, completed or refused.

    ``number``: position in its chain, from 1. ``subject``: a pseudonym. ``details``: no names, photos or embeddings.
    """

    number: int
    at: datetime
    event: str
    outcome: str
    actor: str
    request_id: str | None
    gallery: str | None
    subject: str | None
    details: dict[str, Any]

    def hash(self, before: str) -> str:
        """Return 64 hexadecimal digits. ``before``: the previous line's hash, BEFORE_ALL for the first line."""
        document = {**asdict(self), "at": self.at.astimezone(UTC).isoformat(timespec="microseconds")}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def mac(secret: bytes, number: int, last_hash: str) -> str:
    """Return the MAC of a chain's head."""
    return hmac.digest(secret, f"{number} {last_hash}".encode(), "sha256").hex()


@dataclass(frozen=True)
class Stored:
    """Audit line as stored. ``line``: None if it cannot be parsed."""

    chain: int
    number: int
    line: Line | None
    hash: str


@dataclass(frozen=True)
class Head:
    """Recorded end of a chain: number and hash of its last line, and a MAC."""

    chain: int
    number: int
    hash: str
    mac: str


@dataclass(frozen=True)
class Anchor:
    """Hash of a line, stored where the audit's writers cannot change it.

    ``chain``: SERVICE, or the hash of the chain's first line.
    """

    chain: str
    number: int
    hash: str
    gallery: str | None = None


@dataclass(frozen=True)
class Fault:
    """Violation found in a chain. ``chain``: as in Anchor. ``first`` to ``last``: affected line numbers, if any."""

    kind: Kind
    chain: str
    gallery: str | None
    first: int | None
    last: int | None
    what: str


@dataclass
class Report:
    """Result of a verification. ``signed``: whether MACs were checked. ``ends``: current ends of the chains."""

    signed: bool
    lines: int = 0
    faults: list[Fault] = field(default_factory=list)
    ends: list[Anchor] = field(default_factory=list)


def examine(
    lines: Iterable[Stored],
    heads: Collection[Head],
    secret: bytes | None = None,
    galleries: Mapping[int, str] | None = None,
    anchors: Collection[Anchor] = (),
) -> Report:
    """Verify an audit.

    ``lines``: sorted by chain and number. ``secret``: of the MACs; None skips them. ``galleries``: names of existing
    galleries by chain; None if unknown.
    """
    report = Report(secret is not None)
    ends = {head.chain: head for head in heads}
    noted: dict[str, dict[int, str]] = {}
    for anchor in anchors:
        noted.setdefault(anchor.chain, {})[anchor.number] = anchor.hash
    chains: dict[int, _Chain] = {}
    for key, stored in groupby(lines, key=lambda one: one.chain):
        chains[key] = chain = _Chain(key, noted)
        for one in stored:
            chain.take(one)
        chain.end(ends.pop(key, None), secret)
        report.lines += chain.count
        report.faults += chain.faults
        report.ends.append(Anchor(chain.name, chain.number, chain.last, chain.gallery))
    for head in ends.values():
        what = f"its head counts {head.number} lines, but the chain is empty"
        name = SERVICE if head.chain == OF_SERVICE else str(head.chain)
        gallery = (galleries or {}).get(head.chain)
        report.faults.append(Fault("cut", name, gallery, 1, head.number, what))
    report.faults += _named(chains, galleries)
    known = {chain.name for chain in chains.values()}
    for name in noted.keys() - known:
        gallery = next((anchor.gallery for anchor in anchors if anchor.chain == name), None)
        what = "an anchor names it, but it is missing, or was rewritten from its first line on"
        report.faults.append(Fault("chain_missing", name, gallery, None, None, what))
    return report


class _Chain:
    """Verification state of one chain."""

    def __init__(self, key: int, noted: Mapping[str, Mapping[int, str]]) -> None:
        self.faults: list[Fault] = []
        self.name = SERVICE if key == OF_SERVICE else str(key)
        self.gallery: str | None = None
        self.number, self.last, self.count = 0, BEFORE_ALL, 0
        self.told: list[Line] = []
        """Lines of the service's chain that report the start or end of another chain."""
        self._key = key
        self._noted = noted
        self._agreed = 0

    def take(self, stored: Stored) -> None:
        self.count += 1
        if self.count == 1 and self._key != OF_SERVICE:
            self.name, self.gallery = stored.hash, stored.line.gallery if stored.line else None
        if stored.number <= self.number:
            self._fault("altered", stored.number, stored.number, "duplicate line number: the line was inserted")
            return
        if stored.number > self.number + 1:
            self._fault("missing", self.number + 1, stored.number - 1, "the lines were removed")
        elif stored.line is None:
            self._fault("unreadable", stored.number, stored.number, "the row cannot be parsed as an audit line")
        elif stored.line.hash(self.last) != stored.hash:
            self._altered(stored.number)
        expected = self._noted.get(self.name, {}).get(stored.number)
        if expected == stored.hash:
            self._agreed = stored.number
        elif expected is not None:
            what = f"the anchor of line {stored.number} has another hash: rewritten after line {self._agreed}"
            self._fault("anchor", self._agreed + 1, stored.number, what)
        if stored.line is not None and self._key == OF_SERVICE and stored.line.event in (BEGINS, ENDS):
            self.told.append(stored.line)
        self.number, self.last = stored.number, stored.hash

    def end(self, head: Head | None, secret: bytes | None) -> None:
        beyond = [number for number in self._noted.get(self.name, ()) if number > self.number]
        if beyond:
            what = (
                f"line {max(beyond)} has an anchor but is missing: the chain was cut, or an older backup was restored"
            )
            self._fault("anchor", self.number + 1, max(beyond), what)
        if head is None:
            self._fault("head", None, None, "its head is missing")
        elif head.number > self.number:
            self._fault("cut", self.number + 1, head.number, f"its head counts {head.number} lines")
        elif (head.number, head.hash) != (self.number, self.last):
            self._fault("head", None, None, f"its head names line {head.number}, which is not the last one")
        elif secret is not None and mac(secret, head.number, head.hash) != head.mac:
            what = "its head is not signed by the service: the chain was cut, or rewritten from some line on"
            self._fault("mac", None, head.number, what)

    def _altered(self, number: int) -> None:
        """Record a fault; consecutive altered lines become one."""
        what = "the content differs from what was written: altered, inserted or moved"
        before = self.faults[-1] if self.faults else None
        if before is not None and before.kind == "altered" and before.last == number - 1:
            self.faults.pop()
            self._fault("altered", before.first, number, what)
        else:
            self._fault("altered", number, number, what)

    def _fault(self, kind: Kind, first: int | None, last: int | None, what: str) -> None:
        self.faults.append(Fault(kind, self.name, self.gallery, first, last, what))


def _named(chains: Mapping[int, _Chain], galleries: Mapping[int, str] | None) -> list[Fault]:
    """Compare the service's chain with the other chains and the galleries."""
    told = chains[OF_SERVICE].told if OF_SERVICE in chains else []
    begun = {_text(line.details, "chain"): line.gallery for line in told if line.event == BEGINS}
    ended = {_text(line.details, "chain"): line for line in told if line.event == ENDS}
    others = {chain.name: chain for chain in chains.values() if chain.name != SERVICE}
    faults = []
    for name in begun.keys() - others.keys():
        what = "the service's chain records its start: it was removed, or rewritten from its first line on"
        faults.append(Fault("chain_missing", name, begun[name], None, None, what))
    for name in others.keys() - begun.keys():
        what = "the service's chain does not record its start"
        faults.append(Fault("chain_unknown", name, others[name].gallery, None, None, what))
    for name, line in ended.items():
        chain = others.get(name)
        if chain is not None and (chain.number, chain.last) != (line.details.get("lines"), line.details.get("last")):
            what = f"the service's chain records its end at line {line.details.get('lines')} with another hash"
            faults.append(Fault("altered", name, chain.gallery, None, None, what))
    if galleries is None:
        return faults
    there = {chain.name: key for key, chain in chains.items()}
    for name in begun.keys() - ended.keys():
        if name in there and there[name] not in galleries:
            what = "the gallery is missing, but no deletion is recorded"
            faults.append(Fault("gallery", name, begun[name], None, None, what))
    for key, gallery in galleries.items():
        if key not in chains:
            faults.append(Fault("chain_missing", str(key), gallery, None, None, "the gallery has no chain"))
        elif chains[key].name in ended:
            what = "the gallery exists, but its deletion is recorded"
            faults.append(Fault("gallery", chains[key].name, gallery, None, None, what))
    return faults


def _text(details: Mapping[str, Any], key: str) -> str:
    return str(details.get(key, ""))
