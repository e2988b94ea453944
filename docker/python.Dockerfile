# The Python package with its command line, and the demo. Run "make build" first.
ARG BASE=python:3.13.9-slim-bookworm
FROM ${BASE} AS build
ARG EXTRA=binary
ENV PIP_CONSTRAINT=/src/tools/requirements.txt PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY tools/requirements.txt tools/
COPY python python
RUN python -m venv /opt/awa && /opt/awa/bin/pip install "./python[${EXTRA}]"

FROM ${BASE}
RUN useradd --uid 10001 --create-home awa
COPY --from=build /opt/awa /opt/awa
COPY examples/demo /opt/awa/demo
ENV PATH=/opt/awa/bin:${PATH}
WORKDIR /home/awa
USER 10001:10001
CMD ["awa", "--help"]
