"""Alembic entry point: upgrades the connection that service.storage.db.engine.open_database passes."""

from alembic import context

from service.storage.db.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
