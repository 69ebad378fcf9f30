#!/usr/bin/env bash
# Sets up an environment and runs the tests: bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/setup_env.sh test

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# loadfile: the tests of one file share its fixtures, so one process makes them once.
exec python -m pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
