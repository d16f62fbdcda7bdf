"""Labelled faces: where they are, how they are decoded once, how they are varied."""
