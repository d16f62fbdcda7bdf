"""Add albums: faces of uploaded photos, grouped into people."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "albums",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("gallery_pk", KEY, sa.ForeignKey("galleries.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("risk", sa.Float, nullable=False),
        sa.Column("threshold", sa.Float),
        sa.Column("photo_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_group", sa.Integer, nullable=False, server_default="1"),
        sa.Column("grouped_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("albums_by_gallery", "albums", ["gallery_pk"])
    op.create_index("albums_by_expiry", "albums", ["expires_at"])
    op.create_table(
        "album_groups",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("album_pk", KEY, sa.ForeignKey("albums.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("sealed", sa.LargeBinary),
        sa.Column("subject", sa.String(32)),
        sa.Column("erased", KEY, nullable=False, server_default="0"),
        sa.UniqueConstraint("album_pk", "number"),
        sqlite_autoincrement=True,
    )
    op.create_index("album_groups_by_subject", "album_groups", ["subject"])
    op.create_table(
        "album_faces",
        sa.Column("pk", KEY, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("album_pk", KEY, sa.ForeignKey("albums.pk", ondelete="CASCADE"), nullable=False),
        sa.Column("group_pk", KEY, sa.ForeignKey("album_groups.pk", ondelete="CASCADE")),
        sa.Column("certainty", sa.Float),
        sa.Column("photo", sa.String(32), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("crop", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("album_pk", "id"),
        sqlite_autoincrement=True,
    )
    op.create_index("album_faces_by_album", "album_faces", ["album_pk", "group_pk"])
    op.create_index("album_faces_by_photo", "album_faces", ["album_pk", "photo"])
    op.create_index("album_faces_by_group", "album_faces", ["group_pk"])
