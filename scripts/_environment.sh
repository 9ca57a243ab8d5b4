# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/demo, test and check, at the root of the repository: gives them `$venv`, a
# virtual environment that holds Shoal as it stands in this checkout.
#
#   PYTHON             the interpreter to use (3.11, 3.12 or 3.13) instead of the first one found
#   SHOAL_TORCH_INDEX  the package index to take PyTorch from, and only PyTorch
#   SHOAL_VENV         an environment that is ready: it is used as it is, and nothing is installed
#
# Needs nothing newer than the bash 3.2 of macOS.

venv=.venv
supported='3.11, 3.12 or 3.13'

say() { printf '%s\n' "shoal: $*" >&2; }

# Exit code 2, as for every mistake in what the user gave us.
refuse() {
    say "$*"
    exit 2
}

# version_of PYTHON: prints "3.11.9" if it runs and is one that Shoal supports.
version_of() {
    "$1" -c 'import sys
v = sys.version_info
print("%d.%d.%d" % v[:3]) if (3, 11) <= v[:2] <= (3, 13) else sys.exit(1)' 2>/dev/null
}

check_checkout() {
    local name
    for name in node protocol coordinator compression; do
        [ -d "src/shoal/$name" ] || refuse "src/shoal/$name should be a symbolic link to ../../$name" \
            "and is none: git wrote plain files, as it does on Windows. Clone again inside WSL2" \
            "(or, elsewhere: git config core.symlinks true && git checkout -- src/shoal)."
    done
}

# Sets `python` to an absolute path.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        version_of "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is not Python $supported." \
            "Point PYTHON at one of these, or unset it to have one looked for."
        python=$(command -v "$PYTHON")
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if version_of "$candidate" >/dev/null; then
            python=$(command -v "$candidate")
            return
        fi
    done
    refuse "no Python $supported found. Install one (Debian, Ubuntu: apt install python3" \
        "python3-venv; macOS: brew install python@3.13), or set PYTHON to where it is."
}

# Two digests of what decides whether an environment still fits: one of what it was made from (an
# environment can't be moved, so the path is part of it), one of what is installed into it.
fingerprints() {
    "$python" - <<'PY'
import hashlib, os, sys
made_from = repr((sys.version, os.getcwd(), os.environ.get("SHOAL_TORCH_INDEX", ""))).encode()
installed = b"\0".join(open(name, "rb").read() for name in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256(made_from).hexdigest(), hashlib.sha256(installed).hexdigest())
PY
}

# phase TEXT COMMAND...: one line of progress; the command's own words go to the log, and its last
# ones to the terminal if it fails.
phase() {
    local text=$1 status=0 start=$SECONDS
    shift
    printf '%s' "shoal: $text … " >&2
    printf '\n==> %s\n' "$*" >>"$venv/install.log"
    "$@" >>"$venv/install.log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        printf 'failed\n' >&2
        tail -n 15 "$venv/install.log" >&2
        say "the whole log is in $venv/install.log. Run this again once the cause is gone."
        exit 1
    fi
    printf 'done (%d s)\n' $((SECONDS - start)) >&2
}

pip_install() {
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"
}

install_torch() {
    local pin
    pin=$(grep '^torch==' constraints.txt)
    if [ -n "${SHOAL_TORCH_INDEX:-}" ]; then
        pip_install --index-url "$SHOAL_TORCH_INDEX" "$pin"
    else
        pip_install "$pin"
    fi
}

# prepare_environment run|dev: makes `$venv` right, in no time when it already is. An environment
# for developers also serves to run.
prepare_environment() {
    local kind=$1 what=.
    check_checkout
    if [ -n "${SHOAL_VENV:-}" ]; then
        venv=$SHOAL_VENV
        "$venv/bin/python" -c 'import shoal' 2>/dev/null ||
            refuse "SHOAL_VENV=$venv is no environment that has Shoal. Unset it to have one made."
        return
    fi
    find_python
    local made_from installed old_kind='' old_made_from='' old_installed=''
    read -r made_from installed <<<"$(fingerprints)"
    if [ -f "$venv/shoal-stamp" ]; then
        read -r old_kind old_made_from old_installed <"$venv/shoal-stamp" || true
    fi
    [ "$old_kind" = dev ] && kind=dev
    if [ "$old_kind $old_made_from $old_installed" = "$kind $made_from $installed" ]; then
        return
    fi

    # The marker stands from before the first write until after the last one. Where there is neither
    # marker nor stamp the folder is somebody else's: it is left alone.
    if [ -z "$old_kind" ] && [ ! -e "$venv/shoal-installing" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        refuse "$PWD/$venv is not from these scripts. Move it away and run this again," \
            "or use it as it is with SHOAL_VENV=$venv."
    fi
    mkdir -p "$venv"
    if [ "$old_made_from" != "$made_from" ] || [ -e "$venv/shoal-installing" ]; then
        # What an interrupted pip leaves behind can look installed, so nothing of it is kept.
        : >"$venv/shoal-installing"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name shoal-installing -exec rm -rf {} +
        say "setting up $venv, once, with Python $(version_of "$python")"
        phase "making the environment" "$python" -m venv "$venv"
        if [ "$(uname -s)" = Linux ] && [ -z "${SHOAL_TORCH_INDEX:-}" ] && ! command -v nvidia-smi >/dev/null; then
            say "no NVIDIA GPU here: SHOAL_TORCH_INDEX=https://download.pytorch.org/whl/cpu takes" \
                "PyTorch's CPU build, a tenth of the download"
        fi
    fi
    : >"$venv/shoal-installing"
    rm -f "$venv/shoal-stamp"
    [ "$kind" = run ] || what='.[dev]'
    phase "installing PyTorch" install_torch
    phase "installing Shoal" pip_install -c constraints.txt -e "$what"
    printf '%s\n' "$kind $made_from $installed" >"$venv/shoal-stamp.new"
    mv "$venv/shoal-stamp.new" "$venv/shoal-stamp"
    rm -f "$venv/shoal-installing"
}
