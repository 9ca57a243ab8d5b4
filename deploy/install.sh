#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install.sh [--dry-run] cpu|cuda FOLDER: Shoal from this checkout in a virtual environment of its
# own, at FOLDER. What the images do, and what to do on a machine that runs the systemd units.
#
#   PYTHON             the interpreter (3.11, 3.12 or 3.13); python3 when unset
#   SHOAL_TORCH_INDEX  another package index to take PyTorch from; empty: pip's own
set -euo pipefail

dry_run=no
if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi
usage='usage: deploy/install.sh [--dry-run] cpu|cuda FOLDER'
[ $# -eq 2 ] || { echo "$usage" >&2; exit 2; }
build=$1 folder=$2
python=${PYTHON:-python3}

case "$build" in
    cpu) index=${SHOAL_TORCH_INDEX-https://download.pytorch.org/whl/cpu} ;;
    cuda) index=${SHOAL_TORCH_INDEX-} ;; # the build on PyPI brings its CUDA libraries along
    *) echo "$usage" >&2; exit 2 ;;
esac
case "$folder" in
    /*) ;;
    *) echo "FOLDER = $folder must be an absolute path: scripts in it name the path" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "$python is not Python 3.11, 3.12 or 3.13; set PYTHON to one that is" >&2
    exit 2
fi
torch=$(grep '^torch==' constraints.txt)

run() {
    if [ "$dry_run" = yes ]; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

pip=("$folder/bin/python" -m pip --disable-pip-version-check install --no-input --no-cache-dir --progress-bar off)
run "$python" -m venv "$folder"
if [ -n "$index" ]; then
    run "${pip[@]}" --index-url "$index" "$torch"
else
    run "${pip[@]}" "$torch"
fi
# The build's folders go elsewhere: it would leave them in this checkout, and an old one's files
# would get into the next build.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/info"
printf '[build]\nbuild_base = %s/build\n[egg_info]\negg_base = %s/info\n' "$scratch" "$scratch" \
    >"$scratch/build.cfg"
export DIST_EXTRA_CONFIG=$scratch/build.cfg
run "${pip[@]}" -c constraints.txt .
run "$folder/bin/shoal" --version
