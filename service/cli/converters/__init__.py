"""Readers of other services' databases, for ``kith convert``."""
