"""HTTP: requests in, JSON out. Nothing below this package knows of it."""
