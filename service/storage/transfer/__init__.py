"""Import and export of galleries as NDJSON."""
