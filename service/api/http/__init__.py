"""HTTP handling that all routes share."""
