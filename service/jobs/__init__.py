"""Background jobs, the files that they read, and heavy computations."""
