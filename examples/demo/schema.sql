-- The application's own tables. A row and its job are written together, and so are a result and its completion.

CREATE TABLE files (
    path       text PRIMARY KEY,
    -- The rest is NULL until the file's job has run.
    problem    text,
    size       bigint,
    compressed bigint,
    sha256     bytea,
    -- When the file last changed, as its job saw it: tells a wrong result from a file that changed since.
    changed_ns bigint,
    packed_by  text,
    packed_at  timestamptz
);

CREATE TABLE notes (
    kind    text PRIMARY KEY,
    attempt integer NOT NULL,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
