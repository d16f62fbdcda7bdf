"""Import of galleries as NDJSON, export as NDJSON and Parquet."""
