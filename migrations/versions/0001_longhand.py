"""The longhand: sessions, messages, and what is known about them.

The rules that keep one schema good for plain Postgres, a pooler and a distributed Postgres hold from here on:
tenant and session in every key; no triggers, no serial ids, no volatile defaults; times are parameters.
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROLE = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'tersely_app') THEN
        CREATE ROLE tersely_app NOLOGIN NOSUPERUSER NOBYPASSRLS;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;  -- another migration, of another database of this cluster, was quicker
END
$$
"""

MEMBER = """
DO $$
BEGIN
    -- Since 16 the creator of a role is a member that may not SET ROLE to it.
    IF NOT pg_has_role(
        current_user,
        'tersely_app',
        CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END
    ) THEN
        EXECUTE format('GRANT tersely_app TO %I', current_user);
    END IF;
END
$$
"""

TABLES = {
    "tenants": """
        CREATE TABLE tenants (
            tenant_id text PRIMARY KEY,
            created_at timestamptz NOT NULL
        )""",
    "keys": """
        CREATE TABLE keys (
            tenant_id text NOT NULL,
            id text NOT NULL,
            secret_hash bytea NOT NULL,
            label text NOT NULL,
            created_at timestamptz NOT NULL,
            revoked_at timestamptz,
            PRIMARY KEY (tenant_id, id)
        )""",
    # `plan` is the current epoch, as in `epochs`: one read gives all that a continued session needs.
    # `open_chain` names the history of a session that has no reply yet, so that a retry finds it.
    "sessions": """
        CREATE TABLE sessions (
            tenant_id text NOT NULL,
            id text NOT NULL,
            parent text,
            client_id text,
            strategy text,
            epoch_policy text,
            metadata bytea NOT NULL,
            last_seq bigint NOT NULL,
            turns integer NOT NULL,
            tokens bigint NOT NULL,
            version bigint NOT NULL,
            edits bigint NOT NULL,
            edited boolean NOT NULL,
            calls bigint NOT NULL,
            epoch integer NOT NULL,
            cut bigint NOT NULL,
            plan bytea,
            open_chain bytea,
            last_call_at timestamptz,
            created_at timestamptz NOT NULL,
            updated_at timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, id)
        ) WITH (fillfactor = 60)""",
    # No foreign key here, in `terse` and in `calls`: every write of such rows holds its session's row, and checking
    # that again for each of them is a third of what the write costs. Whoever deletes a session deletes them.
    # `raw` is the client's view, byte for byte; `model_raw` is set where the model's view differs from it.
    # `place` orders the live messages: it is `seq`, but for what belongs between older messages.
    # `digest` identifies a message by its canonical parts; `chain` is set on replies that were relayed and
    # stands for the whole history up to them.
    # `follows` is the message of the history proper that it was said after (0: none; NULL: not known): by that a
    # history which was left behind is told.
    "messages": """
        CREATE TABLE messages (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            seq bigint NOT NULL,
            turn integer NOT NULL,
            tokens integer NOT NULL,
            place double precision NOT NULL,
            role text NOT NULL,
            status text NOT NULL,
            dialect text NOT NULL,
            client_visible boolean NOT NULL,
            model_visible boolean NOT NULL,
            pinned boolean NOT NULL,
            priority smallint NOT NULL DEFAULT 50,
            finish text,
            call bigint NOT NULL,
            digest bytea,
            chain bytea,
            created_at timestamptz NOT NULL,
            raw bytea NOT NULL,
            model_raw bytea,
            follows bigint,
            PRIMARY KEY (tenant_id, session_id, seq)
        )""",
    # What a provider calls a reply and its items, where its clients may go on from a reply, or refer to an item, by
    # that id; and who keeps the history up to it: the provider (`host`), Tersely, or both alike.
    "reply_ids": """
        CREATE TABLE reply_ids (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            seq bigint NOT NULL,
            id text NOT NULL,
            keeper text NOT NULL,
            PRIMARY KEY (tenant_id, session_id, seq, id),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    "terse": """
        CREATE TABLE terse (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            turn integer NOT NULL,
            seq bigint NOT NULL,
            number integer NOT NULL,
            role text NOT NULL,
            source text NOT NULL,
            created_at timestamptz NOT NULL,
            text bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, turn, seq, number)
        )""",
    # State blocks, each with the message that it came with (`seq` 0: with none); several of one message are numbered.
    "states": """
        CREATE TABLE states (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            seq bigint NOT NULL,
            number integer NOT NULL,
            source text NOT NULL,
            created_at timestamptz NOT NULL,
            text bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, seq, number),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    "scratchpads": """
        CREATE TABLE scratchpads (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            updated_at timestamptz NOT NULL,
            text bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    "epochs": """
        CREATE TABLE epochs (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            number integer NOT NULL,
            cut bigint NOT NULL,
            reason text NOT NULL,
            head_tokens integer NOT NULL,
            tokens_before integer NOT NULL,
            tokens_after integer NOT NULL,
            created_at timestamptz NOT NULL,
            plan bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, number),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # One row per upstream call: what was sent and what the provider reported, so that savings are measured.
    "calls": """
        CREATE TABLE calls (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            number bigint NOT NULL,
            turn integer NOT NULL,
            model text NOT NULL,
            strategy text NOT NULL,
            epoch integer NOT NULL,
            cut bigint NOT NULL,
            last_seq bigint NOT NULL,
            tools bytea,
            tokens_before integer NOT NULL,
            tokens_after integer NOT NULL,
            input_tokens integer,
            cached_tokens integer,
            output_tokens integer,
            status integer,
            created_at timestamptz NOT NULL,
            finished_at timestamptz,
            PRIMARY KEY (tenant_id, session_id, number)
        )""",
    # What a request carries beside its history (tool definitions), once per content.
    "attributes": """
        CREATE TABLE attributes (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            digest bytea NOT NULL,
            kind text NOT NULL,
            created_at timestamptz NOT NULL,
            raw bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, digest),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    "appends": """
        CREATE TABLE appends (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            key text NOT NULL,
            digest bytea NOT NULL,
            first_seq bigint NOT NULL,
            last_seq bigint NOT NULL,
            turn integer NOT NULL,
            created_at timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, session_id, key),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # Replies to side calls (a client's own summaries): short-lived marks by which a later request that begins
    # with such a summary is recognised.
    "side_replies": """
        CREATE TABLE side_replies (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            anchor bytea NOT NULL,
            created_at timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, session_id, anchor),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # Oversized tool outputs by the SHA-256 of their text, which is in the message and only there.
    "artifacts": """
        CREATE TABLE artifacts (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            sha256 bytea NOT NULL,
            seq bigint NOT NULL,
            call_id bytea NOT NULL,
            chars integer NOT NULL,
            created_at timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, session_id, sha256, seq),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # Casefolded text of full blocks of messages, made when a session is first searched. Blocks are fixed ranges of
    # sequence numbers, so they stay good whatever becomes of the messages' status.
    "search_pages": """
        CREATE TABLE search_pages (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            page bigint NOT NULL,
            text text NOT NULL,
            PRIMARY KEY (tenant_id, session_id, page),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # The distinct words of a run of search pages: what is not among them is in none of the pages.
    "search_words": """
        CREATE TABLE search_words (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            segment bigint NOT NULL,
            words text NOT NULL,
            PRIMARY KEY (tenant_id, session_id, segment),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # The term index of full blocks of messages (`app.domain.term_index`), made when a session is first ranked.
    "term_pages": """
        CREATE TABLE term_pages (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            page bigint NOT NULL,
            terms bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, page),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # What a model makes of messages: `signs` are the signs of the vector's numbers, for a quick first look; `numbers`
    # are 32-bit floats, or `meaning` (see VECTOR). All NULL: there was nothing to embed, or the model refused it.
    "embeddings": """
        CREATE TABLE embeddings (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            model text NOT NULL,
            seq bigint NOT NULL,
            signs bit varying,
            numbers bytea,
            PRIMARY KEY (tenant_id, session_id, model, seq),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # What stands for ranges of messages. `basis` tells whether a row still counts (see `app.store.summaries`); a row
    # without a text says that nothing shorter was found.
    "summaries": """
        CREATE TABLE summaries (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            number bigint NOT NULL,
            purpose text NOT NULL,
            first_seq bigint NOT NULL,
            last_seq bigint NOT NULL,
            basis bytea NOT NULL,
            tokens integer NOT NULL,
            source text NOT NULL,
            model text NOT NULL,
            created_at timestamptz NOT NULL,
            text bytea,
            PRIMARY KEY (tenant_id, session_id, number),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # Belongs to the tenant: what left the contexts of its sessions, day by day.
    "memory": """
        CREATE TABLE memory (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            day date NOT NULL,
            first_seq bigint NOT NULL,
            last_seq bigint NOT NULL,
            created_at timestamptz NOT NULL,
            words text NOT NULL,
            text bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, day, first_seq, last_seq)
        )""",
    # Who works on a session in the background, until when at most.
    "leases": """
        CREATE TABLE leases (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            holder text NOT NULL,
            until timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, session_id),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # The newest command of each chat, with its answer once it has one: what is sent again is not done again.
    "commands": """
        CREATE TABLE commands (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            digest bytea NOT NULL,
            last_seq bigint NOT NULL,
            started_at timestamptz NOT NULL,
            until timestamptz NOT NULL,
            finished_at timestamptz,
            text bytea,
            PRIMARY KEY (tenant_id, session_id),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
    # Models that failed a tenant repeatedly, and how long they are left alone.
    "breakers": """
        CREATE TABLE breakers (
            tenant_id text NOT NULL,
            name text NOT NULL,
            failures integer NOT NULL,
            open_until timestamptz,
            updated_at timestamptz NOT NULL,
            PRIMARY KEY (tenant_id, name)
        )""",
    # Belong to the tenant and outlive the session they came from. `terms` are what they can be found by.
    "memos": """
        CREATE TABLE memos (
            tenant_id text NOT NULL,
            id text NOT NULL,
            session_id text,
            tags text[] NOT NULL,
            terms text[] NOT NULL,
            created_at timestamptz NOT NULL,
            content bytea NOT NULL,
            PRIMARY KEY (tenant_id, id)
        )""",
    # What happened to a session that its messages do not show: counts and names as JSON, never content.
    "events": """
        CREATE TABLE events (
            tenant_id text NOT NULL,
            session_id text NOT NULL,
            number bigint NOT NULL,
            kind text NOT NULL,
            created_at timestamptz NOT NULL,
            body bytea NOT NULL,
            PRIMARY KEY (tenant_id, session_id, number),
            FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
        )""",
}

# Where there is `vector` (and we may have it), embeddings are stored and compared with it; elsewhere as bytes.
VECTOR = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_available_extensions WHERE name = 'vector') THEN
        CREATE EXTENSION IF NOT EXISTS vector;
        ALTER TABLE embeddings ADD COLUMN meaning vector;
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;
END
$$
"""

# Unpacking costs more than reading: text that is searched is stored as it is.
STORAGE = (
    "ALTER TABLE search_pages ALTER COLUMN text SET STORAGE EXTERNAL",
    "ALTER TABLE search_words ALTER COLUMN words SET STORAGE EXTERNAL",
    "ALTER TABLE term_pages ALTER COLUMN terms SET STORAGE EXTERNAL",
    "ALTER TABLE embeddings ALTER COLUMN numbers SET STORAGE EXTERNAL",
)

INDEXES = (
    "CREATE INDEX messages_chain ON messages (tenant_id, chain) WHERE chain IS NOT NULL",
    "CREATE INDEX reply_ids_id ON reply_ids (tenant_id, id)",
    "CREATE INDEX messages_reply ON messages (tenant_id, digest) WHERE chain IS NOT NULL",
    # Only for queries that say `turn + 0 IS NOT NULL` too. In a database that has not been analysed yet all indexes of
    # a session's messages look equally good, and with this one a look at the tail would read the whole session.
    "CREATE INDEX messages_turn ON messages (tenant_id, session_id, turn) WHERE turn + 0 IS NOT NULL",
    # The few rows that are not simply the next message of the history; every other one's place is its number.
    # The planner takes a comparison of two columns for true of nearly all rows, and a comparison of an expression with
    # a constant for true of nearly none: only the latter makes it use this index.
    "CREATE INDEX messages_exceptions ON messages (tenant_id, session_id, seq) "
    "WHERE CASE WHEN status <> 'live' OR turn = 0 OR place <> seq::float8 OR NOT client_visible OR NOT model_visible "
    "THEN 1 ELSE 0 END = 1",
    "CREATE INDEX messages_instructions ON messages (tenant_id, session_id) WHERE turn = 0 AND status = 'live'",
    "CREATE INDEX sessions_open ON sessions (tenant_id, open_chain) WHERE open_chain IS NOT NULL",
    "CREATE INDEX sessions_client ON sessions (tenant_id, client_id) WHERE client_id IS NOT NULL",
    "CREATE INDEX sessions_parent ON sessions (tenant_id, parent) WHERE parent IS NOT NULL",
    "CREATE INDEX sessions_recent ON sessions (tenant_id, created_at DESC, id DESC)",
    "CREATE INDEX summaries_purpose ON summaries (tenant_id, session_id, purpose, last_seq DESC, number DESC)",
    "CREATE INDEX memory_day ON memory (tenant_id, day, created_at DESC)",
    "CREATE INDEX memory_recent ON memory (tenant_id, created_at DESC, session_id DESC)",
    "CREATE INDEX artifacts_content ON artifacts (tenant_id, sha256)",
    "CREATE INDEX side_replies_anchor ON side_replies (tenant_id, anchor)",
    "CREATE INDEX memos_recent ON memos (tenant_id, created_at DESC, id DESC)",
    "CREATE INDEX keys_id ON keys (id)",
)

OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"
# A key is looked up before its tenant is known: by its id alone, which the caller must present.
OWN_KEY = OWN_ROWS + " OR id = nullif(current_setting('app.key_id', true), '')"

# `tersely keys list` shows those of all tenants: a transaction that says so may read keys, and nothing else.
LISTED_KEYS = "current_setting('app.list_keys', true) = 'on'"

# Idle sessions of all tenants are looked for in one go: a transaction that says so may see which there are.
LISTED_SESSIONS = "current_setting('app.list_sessions', true) = 'on'"


def upgrade() -> None:
    """Create everything; each statement on its own, as a distributed Postgres wants it."""
    op.execute(ROLE)
    op.execute(MEMBER)
    for name, ddl in TABLES.items():
        op.execute(ddl)
        rows = OWN_KEY if name == "keys" else OWN_ROWS
        op.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {name} USING ({rows}) WITH CHECK ({OWN_ROWS})")
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO tersely_app")
    op.execute(f"CREATE POLICY listed ON keys FOR SELECT USING ({LISTED_KEYS})")
    op.execute(f"CREATE POLICY listed ON sessions FOR SELECT USING ({LISTED_SESSIONS})")
    for ddl in (*STORAGE, VECTOR, *INDEXES):
        op.execute(ddl)


def downgrade() -> None:
    """Drop everything."""
    for name in reversed(TABLES):
        op.execute(f"DROP TABLE {name}")
