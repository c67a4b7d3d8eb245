#!/usr/bin/env bash
# The checks that need a GPU, in under five minutes: NCCL at world size 1, the refusal of two ranks on one
# GPU, and NCCL's own error when a cell insists. Needs a Python with torch, cloudpickle and pytest; PYTHON
# names it. With nbval there, the notebooks' cells tagged needs_gpu run too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c 'import torch; print("torch", torch.__version__, "NCCL", ".".join(map(str, torch.cuda.nccl.version()))); print(torch.cuda.get_device_name())' || {
  echo "no CUDA device that torch can use" >&2
  exit 1
}
"$python" -m pytest -q -o addopts= -m gpu tests/ranks/test_gpu.py
if "$python" -c 'import nbval, ipykernel' 2>/dev/null; then
  # Only errors count here: what these cells show is recorded on machines without a GPU.
  "$python" -m pytest -q --nbval-lax --nbval-current-env --nbval-cell-timeout=120 notebooks
fi
