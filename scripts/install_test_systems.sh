#!/usr/bin/env bash
# Installs what the cluster tests need, from Debian's packages, as root: SLURM, network namespaces, PostgreSQL. Without them,
# these tests are skipped and say so.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 procps postgresql >/dev/null
