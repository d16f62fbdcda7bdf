"""Alembic's entry point: migrates the connection it is handed (see service.gallery.database.open_database)."""

from alembic import context

from service.gallery.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
