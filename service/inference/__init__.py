"""Inference: photo decoding, URL fetching, archives, batching and the served recognizers."""
