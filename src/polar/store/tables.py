"""The tables, schema version 1. One layout for SQLite and PostgreSQL; everything that may hold any text is bytes.

`sessions`     one row a session.
`completions`  one row a completion: what matching looks up in columns, the rest packed (see `polar.store.delta`).
`blobs`        what many rows share, by the BLAKE2b-128 of its content: tool sets, long messages, blocks of prompt ids.
`meta`         the schema version, and a row that a sick store writes to learn whether it has recovered.

A change here needs a new version and a migration in `polar.store.migrations`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("secret", LargeBinary, nullable=False),
    Column("kind", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("closed", Double),
    Column("settings", LargeBinary, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Index("sessions_created", "created"),
)

completions = Table(
    "completions",
    metadata,
    Column("session", Text, ForeignKey("sessions.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("choice", Integer, nullable=False),
    Column("parent", Integer),
    Column("base", Integer),  # the completion that this row is coded against: the parent, or none
    Column("depth", Integer, nullable=False),  # the number of rows below this one that a rebuild reads
    Column("status", Text, nullable=False),
    Column("delivered", Boolean, nullable=False),
    Column("stored", Boolean, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("turn", LargeBinary, nullable=False),
    Column("loose", LargeBinary, nullable=False),
    Column("thinking_hash", LargeBinary, nullable=False),
    Column("sampled", Integer, nullable=False),  # the number of sampled ids
    Column("tools", LargeBinary),  # a blob's hash; null for no tools
    Column("prompt_keep", BigInteger, nullable=False),  # leading ids taken from the base's prompt and sampled ids
    Column("prompt_blocks", LargeBinary),  # hashes of whole blocks of ids, where there is no base
    Column("prompt_ids", LargeBinary),  # the ids after those; null for no ids at all
    Column("sampled_ids", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("session", "number"),
    ForeignKeyConstraint(["session", "base"], ["completions.session", "completions.number"]),
)

blobs = Table(
    "blobs",
    metadata,
    Column("hash", LargeBinary, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
