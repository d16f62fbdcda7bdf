"""Database engine, tables, migrations, keys and row encryption."""
