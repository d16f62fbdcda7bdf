"""Import and export of galleries as NDJSON and Parquet."""
