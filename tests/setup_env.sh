# Sourced by tests/run.sh, examples/quickstart.sh and .ci/run: gives `python` with raptor-hf of this checkout in it.
#
#   . tests/setup_env.sh EXTRAS      EXTRAS: the extras to install, e.g. "test" or "demo"
#
# An active virtual environment that already holds this checkout is used as it is; otherwise `.venv` in the checkout
# is made, or brought up to date. Environment variables: PYTHON (the interpreter to make `.venv` with) and
# TORCH_VERSION (the torch to install where none is importable; install your own build first to choose another).

raptor_setup() {
    local extras="$1" root stamp wider
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

    # -I: neither PYTHONPATH nor the working directory may pose as an installed package.
    local installed='import importlib.util as u, pathlib, sys; s = u.find_spec("raptor_hf")
sys.exit(not (s and s.origin and pathlib.Path(s.origin).resolve().is_relative_to(sys.argv[1])))'
    if [ -n "${VIRTUAL_ENV:-}" ] && [ "${VIRTUAL_ENV}" != "$root/.venv" ] \
        && "$VIRTUAL_ENV/bin/python" -I -c "$installed" "$root" 2>/dev/null; then
        PATH="$VIRTUAL_ENV/bin:$PATH"
        return
    fi

    [ -x "$root/.venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$root/.venv"
    # shellcheck disable=SC1091
    . "$root/.venv/bin/activate"
    # A stamp a set of extras, newer than pyproject.toml: nothing to install. `dev` holds `test`, which holds `demo`.
    for wider in "$extras" test dev; do
        case "$extras/$wider" in dev/test) continue ;; esac
        stamp="$root/.venv/.raptor-hf-$wider"
        if [ "$stamp" -nt "$root/pyproject.toml" ] && python -I -c "$installed" "$root"; then
            return
        fi
    done
    echo "Installing raptor-hf[$extras] into $root/.venv (a few minutes the first time) ..." >&2
    if ! python -I -c 'import torch' 2>/dev/null; then
        python -m pip install --quiet "torch==${TORCH_VERSION:-2.13.0}"
    fi
    python -m pip install --quiet --editable "$root[$extras]"
    touch "$root/.venv/.raptor-hf-$extras"
}

raptor_setup "$@"
