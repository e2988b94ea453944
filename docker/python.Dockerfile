# The Python package with its command line and the demo. Run "make build" first.
FROM python:3.13-slim
RUN useradd --system --create-home awa
COPY python /opt/awa/python
RUN pip install --no-cache-dir "/opt/awa/python[demo]"
COPY examples /opt/awa/examples
WORKDIR /opt/awa
USER awa
