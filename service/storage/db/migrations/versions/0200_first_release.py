"""Tables of release 0.2.0.

A new database is created from service.storage.db.tables and stamped with the newest revision.
Later revisions follow this one, named like 0201_add_x.py, and upgrade the tables of earlier releases.
"""

revision = "0200"
down_revision = None
