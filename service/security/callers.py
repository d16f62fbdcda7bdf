"""Callers: who sends a request, and what the key permits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from service.core.errors import ForbiddenError, GalleryNotFoundError, KithError
from service.security.api_keys import EVERYTHING, Rights


@dataclass(frozen=True)
class Caller:
    """Sender of a request. ``name``: as in the audit (service.core.actor)."""

    name: str
    rights: Rights

    @property
    def sees_vectors(self) -> bool:
        """True if the caller may compare embeddings with subjects, choose a risk and see exact similarities.

        They reveal templates (docs/decisions.md, 56).
        """
        return self.rights.may("vectors")

    def check_vectors(self, what: str) -> None:
        """Raises ForbiddenError if ``what``, a plural, needs the scope vectors and the caller lacks it."""
        if not self.sees_vectors:
            raise ForbiddenError(f"{what} need the scope 'vectors'", scope="vectors")

    def check_gallery(self, name: str) -> None:
        """Raises GalleryNotFoundError if the key is not for the gallery, as if it did not exist."""
        if not self.rights.sees(name):
            raise mark_hidden(GalleryNotFoundError(f"there is no gallery {name!r}"))


def mark_hidden(error: KithError) -> KithError:
    """Mark a 404 that hides a resource from the caller's key, so that the audit records it."""
    error.hides_existence = True
    return error


OPERATOR: Final = Caller("operator", EVERYTHING)
ANONYMOUS: Final = Caller("anonymous", EVERYTHING)
