#!/usr/bin/env bash
# Sets up an environment and runs the demonstration, offline, on CPU: bash examples/quickstart.sh [ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/setup_env.sh demo

export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec raptor-hf quickstart "$@"
