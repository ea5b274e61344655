"""Let the service read which schema the database has: `/readyz` names a mismatch."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Grant the read."""
    op.execute("GRANT SELECT ON alembic_version TO tersely_app")


def downgrade() -> None:
    """Revoke it."""
    op.execute("REVOKE SELECT ON alembic_version FROM tersely_app")
