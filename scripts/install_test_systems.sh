#!/usr/bin/env bash
# Installs Debian packages that some tests need, as root: SLURM, network namespaces, PostgreSQL, a browser, zsh. Without
# them, pytest skips these tests with a reason.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 procps postgresql chromium chromium-driver zsh >/dev/null
