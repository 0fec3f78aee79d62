CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO schema_version VALUES (1);
CREATE TABLE settings (name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO settings VALUES ('line_format', '- {text}' || char(10));
INSERT INTO settings VALUES ('dated_line_format', '- {date}: {text}' || char(10));
CREATE TABLE namespaces (
  ns TEXT NOT NULL PRIMARY KEY, tenant TEXT NOT NULL, "user" TEXT, agent TEXT, run TEXT,
  epoch INTEGER NOT NULL
);
INSERT INTO namespaces VALUES ('["default", "alice", null, null]', 'default', 'alice', NULL, NULL, 7);
CREATE TABLE facts (
  seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, tenant TEXT NOT NULL,
  "user" TEXT, agent TEXT, run TEXT, ns TEXT NOT NULL REFERENCES namespaces (ns),
  collection TEXT NOT NULL, text TEXT NOT NULL, line TEXT NOT NULL, line_key TEXT NOT NULL,
  hash TEXT NOT NULL, metadata TEXT NOT NULL CHECK (json_valid(metadata)),
  turns TEXT NOT NULL CHECK (json_valid(turns)), created_at DATETIME NOT NULL,
  updated_at DATETIME NOT NULL, valid_at DATETIME, invalid_at DATETIME, encode BOOLEAN NOT NULL,
  kv_state TEXT NOT NULL, kv_reason TEXT, kv_attempts INTEGER NOT NULL, kv_not_before DATETIME,
  UNIQUE (tenant, id)
);
INSERT INTO facts VALUES (
  1, 'f1', 'default', 'alice', NULL, NULL, '["default", "alice", null, null]', 'memories',
  'Likes tea', '- Likes tea' || char(10), '260c71b1c256ae1fae5ff3cb994b7ae3',
  'ed0d2a668f61805c737f938e64f1961d', '{"a": 1}', '[]', '2024-05-06 07:08:09.000000',
  '2024-05-06 07:08:09.000000', NULL, NULL, 1, 'ready', NULL, 0, NULL
);
CREATE TABLE embeddings (
  seq INTEGER NOT NULL PRIMARY KEY REFERENCES facts (seq) ON DELETE CASCADE, vector BLOB NOT NULL
);
INSERT INTO embeddings VALUES (1, x'0000803f00000000');
CREATE TABLE behind (
  ns TEXT NOT NULL, line_key TEXT NOT NULL, behind_seq INTEGER NOT NULL,
  PRIMARY KEY (ns, line_key, behind_seq)
);
CREATE INDEX facts_by_segment ON facts (ns, line_key);
CREATE INDEX facts_by_owner ON facts (tenant, user, collection);
CREATE INDEX facts_by_kv_state ON facts (kv_state, seq);
CREATE INDEX namespaces_by_owner ON namespaces (tenant, user);
CREATE INDEX behind_by_fact ON behind (behind_seq);
