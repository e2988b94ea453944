# PostgreSQL with the extension. Run "make build" first.
ARG BASE=postgres:18.6-bookworm
FROM ${BASE}
COPY extension/awa.control build/awa--*.sql /usr/share/postgresql/${PG_MAJOR}/extension/
COPY docker/create_extension.sql /docker-entrypoint-initdb.d/
# The base image's user "postgres".
USER 999:999
