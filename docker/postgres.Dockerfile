# PostgreSQL with the extension. Run "make build" first.
ARG POSTGRES_VERSION=18
FROM postgres:${POSTGRES_VERSION}
COPY extension/awa.control build/awa--*.sql /tmp/awa/
RUN mv /tmp/awa/* "$(pg_config --sharedir)/extension/" && rmdir /tmp/awa
COPY docker/create_extension.sql /docker-entrypoint-initdb.d/
