# syntax=docker/dockerfile:1
# Two stages: the first installs, the second only runs. Nothing is compiled: all dependencies come as wheels.

# `make pin-images` prints the digest that the tag has today.
ARG PYTHON_IMAGE=python:3.13.14-slim-bookworm@sha256:9d7f287598e1a5a978c015ee176d8216435aaf335ed69ac3c38dd1bbb10e8d64

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/tersely
COPY requirements.lock ./
RUN python -m venv venv \
 && venv/bin/python -m pip install --require-hashes --only-binary :all: -r requirements.lock \
 && venv/bin/python -m pip uninstall --yes pip \
 && printf '#!/opt/tersely/venv/bin/python\nimport sys\n\nfrom tersely.cli import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n' > venv/bin/tersely \
 && chmod 755 venv/bin/tersely
COPY pyproject.toml ./
COPY migrations migrations
COPY app app
RUN venv/bin/python -m compileall -q app

FROM ${PYTHON_IMAGE}
# Without DATABASE_URL the service keeps a Postgres of its own here: then mount a volume.
RUN useradd --uid 10001 --home-dir /var/lib/tersely --create-home --shell /usr/sbin/nologin tersely \
 && chmod 700 /var/lib/tersely
COPY --from=build /opt/tersely /opt/tersely
# In a container the service listens on all addresses, so callers must show a key (`tersely keys create`).
ENV PATH=/opt/tersely/venv/bin:$PATH \
    PYTHONPATH=/opt/tersely/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TERSELY_DATA_DIR=/var/lib/tersely \
    TERSELY_AUTH=keys
WORKDIR /opt/tersely
USER 10001
VOLUME ["/var/lib/tersely"]
EXPOSE 8484
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8484, timeout=2); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["tersely", "serve", "--host", "0.0.0.0", "--port", "8484"]
