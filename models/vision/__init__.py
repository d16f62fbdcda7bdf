"""Face detection, alignment, recognition, quality and liveness."""
