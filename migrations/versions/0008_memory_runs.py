"""Exact messages of each memory entry, and what a session's summaries cost by day and model.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# Sums over the calls of the summarizer's model, by day (UTC).
SUMMARY_COSTS = """
CREATE TABLE summary_costs (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    day date NOT NULL,
    model text NOT NULL,
    calls bigint NOT NULL,
    input_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    refused bigint NOT NULL,
    PRIMARY KEY (tenant_id, session_id, day, model),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"


def upgrade() -> None:
    """Add the columns and the table; older code goes on without them."""
    # `runs`: the ranges of sequence numbers that the entry tells of, as JSON; NULL: the whole of it. `forgotten`: the
    # tenant deleted the entry; the row stays without its text, so that nothing tells of the same messages again.
    op.execute("ALTER TABLE memory ADD COLUMN runs bytea")
    op.execute("ALTER TABLE memory ADD COLUMN forgotten boolean NOT NULL DEFAULT false")
    op.execute(SUMMARY_COSTS)
    op.execute("ALTER TABLE summary_costs ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE summary_costs FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON summary_costs USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON summary_costs TO tersely_app")


def downgrade() -> None:
    """Drop them."""
    op.execute("DROP TABLE summary_costs")
    op.execute("ALTER TABLE memory DROP COLUMN forgotten")
    op.execute("ALTER TABLE memory DROP COLUMN runs")
