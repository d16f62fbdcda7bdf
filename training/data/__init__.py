"""Labeled face sets: reading, caching, sampling and augmentation."""
