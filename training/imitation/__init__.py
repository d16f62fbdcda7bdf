"""Imitation of a published network, block by block."""
