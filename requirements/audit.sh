#!/usr/bin/env bash
# Look the pinned dependencies up in a vulnerability database: audit.sh PYTHON VENV [OPTION...]
# (make audit). VENV is made for pip-audit alone; options and exit codes are those of audit.py.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1 venv=$2
shift 2
stamp=$venv/.installed-$(sha256sum requirements/audit.txt | cut -c 1-16)
if [ ! -e "$stamp" ]; then
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    "$python" -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        -r requirements/audit.txt >"$venv/install.log" 2>&1; then
        tail -n 5 "$venv/install.log" >&2
        echo "audit: NOT CHECKED: pip-audit cannot be installed."
        [[ " $* " == *" --unreachable-is-fine "* ]] && exit 0
        exit 2
    fi
    touch "$stamp"
fi
exec "$venv/bin/python" requirements/audit.py "$venv/bin/pip-audit" "$@"
