"""API compatible with CompreFace, for clients that were written for it (docs/moving-here.md)."""
