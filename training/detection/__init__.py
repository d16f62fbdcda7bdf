"""A compact five-point face detector with SCRFD-style outputs."""
