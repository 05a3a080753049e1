#!/usr/bin/env bash
# Fetch what the system tests start: tools.sh VENV (make tools). Debian and Ubuntu only.
#
# Prometheus and a headless Chromium come as the distribution's packages with those libraries that
# the machine lacks, and are unpacked into VENV/tools: nothing is installed, no root is needed where
# apt's lists are fresh. Elsewhere, or without network, this says so and succeeds: the tests that
# need the programs are skipped with the same words.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
tools=$(realpath -m "$venv/tools")
stamp=$tools/.fetched-$(sha256sum requirements/tools.sh | cut -c 1-16)
[ -e "$stamp" ] && exit 0

give_up() {
    echo "tools: $*; the tests that start Prometheus or a browser will be skipped" >&2
    exit 0
}

wanted=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || wanted+=(prometheus)
command -v chromium-headless-shell >/dev/null || wanted+=(chromium-headless-shell fonts-dejavu-core)
mkdir -p "$tools"
if [ ${#wanted[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || give_up "no apt-get here (needs: ${wanted[*]})"
    began=$SECONDS
    echo "Fetching ${wanted[*]} for the system tests"
    if ! apt-cache show "${wanted[@]}" >/dev/null 2>&1; then
        apt-get update -qq >/dev/null 2>&1 || give_up "apt-get update failed"
    fi
    packages=$(apt-get install --simulate --no-install-recommends "${wanted[@]}" 2>/dev/null |
        awk '/^Inst/ { print $2 }') || give_up "the packages ${wanted[*]} are not to be had"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # shellcheck disable=SC2086  # one word a package
    (cd "$folder" && apt-get download -qq $packages >/dev/null 2>&1) || give_up "download failed"
    for package in "$folder"/*.deb; do
        dpkg-deb --extract "$package" "$tools"
    done
    echo "Fetched after $((SECONDS - began)) s"
fi
"$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
    -r requirements/tools.txt || give_up "pip could not install the browser's driver"
touch "$stamp"
