#!/usr/bin/env bash
# Measures one card (bench/gpu/check.py says what), in under 8 minutes: bench/gpu_check.sh [--dry-run]
# Needs Python 3.11 or newer with torch 2.11 or newer, numpy, numba, safetensors, xxhash and rich;
# PYTHON names it. Nothing is installed and nothing is fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# The first signal makes it print what it has; a hung driver does not hear it.
exec timeout --foreground --signal=INT --kill-after=15 460 "$PYTHON" -m bench.gpu.check "$@"
