# One node of a cluster: HiPress, and an ssh server by which `hipress run` reaches it.
# How to build and use it: docs/containers.md.

# Any Debian or Ubuntu, with or without Python: docs/containers.md names one for CUDA.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Of whoever mounts keys and data, so that the files on both sides have one owner.
ARG USER_ID=1000

# gcc: Triton builds a small library for each GPU kernel. Host keys that the package makes would be
# the same in every copy of the image, and known to all who have it.
# No versions: they differ from base to base.
# hadolint ignore=DL3008
RUN apt-get update \
    && { python3 -c "import ensurepip" || set -- python3 python3-dev python3-venv; } \
    && apt-get install -y --no-install-recommends \
        gcc libc6-dev make openssh-client openssh-server "$@" \
    && rm -rf /var/lib/apt/lists/* \
    && rm -f /etc/ssh/ssh_host_*

# SetEnv: a session by ssh does not get the image's own variables.
RUN useradd --create-home --no-log-init --non-unique --shell /bin/bash --uid "$USER_ID" hipress \
    && install -d -o hipress /hipress \
    && printf '%s\n' \
        'Port 22222' \
        'HostKey /keys/host_key' \
        'AuthorizedKeysFile /keys/authorized_keys' \
        'PasswordAuthentication no' \
        'KbdInteractiveAuthentication no' \
        'UsePAM no' \
        'PidFile none' \
        'SetEnv PATH=/hipress/.venv/bin:/usr/local/bin:/usr/bin:/bin' \
        > /etc/ssh/sshd_node \
    && printf '%s\n' \
        'Host *' \
        '    IdentityFile /keys/id_ed25519' \
        '    UserKnownHostsFile /keys/known_hosts' \
        > /etc/ssh/ssh_config.d/hipress.conf

# By name: in some bases another user has the number too.
# hadolint ignore=DL3066
USER hipress
WORKDIR /hipress
ENV PATH=/hipress/.venv/bin:$PATH PIP_NO_CACHE_DIR=1

# Before the source, which is installed as a link: after an edit nothing is installed again.
COPY --chown=hipress:hipress LICENSE Makefile README.md constraints.txt pyproject.toml setup.py ./
RUN mkdir src && make setup
COPY --chown=hipress:hipress . .

EXPOSE 22222
CMD ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/sshd_node"]
