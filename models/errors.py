"""What can go wrong with a model pack or a photo, before any transport knows of it."""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything the ``models`` package raises on purpose."""


class PackError(ModelError):
    """A model pack cannot be used. ``field`` names the manifest key (dotted) or the file at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class RuntimeUnavailableError(ModelError):
    """No inference runtime, or not the execution provider that was asked for."""
