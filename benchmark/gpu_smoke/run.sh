#!/usr/bin/env bash
# Every test that needs a GPU, in under ten minutes, with a log of each under results/DATE-GPU/.
#
#     benchmark/gpu_smoke/run.sh [OUT]
#
# PY names the Python to use (default: the checkout's environment). BUDGET_S is the time for all of it; a
# file whose turn comes later is listed as not run. Exit status 1 if anything failed or was not run.
set -uo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-.venv/bin/python}
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
gpu=$("$PY" -c 'import torch; print(torch.cuda.get_device_name(0).replace(" ", "-"))') || exit 1
out=${1:-benchmark/results/gpu_smoke/$(date -u +%Y-%m-%dT%H%M)-$gpu}
mkdir -p "$out"
deadline=$((SECONDS + ${BUDGET_S:-580}))
status=0

# These share the GPU: they check values, not times or free memory.
together=(
    test/registered/kernels/test_fp8_kernels.py
    test/registered/kernels/test_hopper_cuda.py
    test/registered/kernels/test_moe_kernels.py
    test/registered/kernels/test_fused_kernels.py
    test/registered/kernels/test_paged_attention.py
    test/registered/kernels/test_gdn_cuda.py
    test/registered/kernels/test_gdn_prefill.py
    test/registered/attention/test_gdn_backend_cuda.py
    test/registered/e2e/test_models_cuda.py
    test/registered/e2e/test_engine_cuda.py
    test/registered/e2e/test_drafters_cuda.py
)
# These compare the device's own counters.
alone=(
    test/registered/kernels/test_memory_cuda.py
    test/registered/unit/test_hicache_cuda.py
)

"$PY" - > "$out/environment.txt" <<'PYTHON'
import importlib.metadata as metadata
import platform

import torch

print("gpu", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
print("python", platform.python_version(), "torch", torch.__version__)
for name in ("triton", "cuda-bindings", "flashinfer-python", "transformers"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "not installed")
PYTHON

note() { echo "$1" | tee -a "$out/summary.txt"; }

run_file() {
    local file=$1 name left begin=$SECONDS
    name=$(basename "$file" .py)
    left=$((deadline - SECONDS))
    if ((left < 5)); then
        note "not run  $name: out of time"
        return 1
    fi
    # -s keeps the figures that tests print; the interpreter's runs need no GPU.
    if timeout "$left" "$PY" -m pytest -q -s --durations=3 -k "not interpreter" "$file" > "$out/$name.log" 2>&1; then
        note "passed  $name  $((SECONDS - begin)) s  $(tail -1 "$out/$name.log")"
    else
        note "FAILED  $name  $((SECONDS - begin)) s  $(tail -1 "$out/$name.log")"
        return 1
    fi
}

for file in "${alone[@]}"; do run_file "$file" || status=1; done
pids=()
for file in "${together[@]}"; do
    run_file "$file" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
left=$((deadline - SECONDS))
if ((left > 20)); then
    if ! timeout "$left" "$PY" benchmark/gpu_smoke/repeat_stages.py > "$out/repeat_stages.log" 2>&1; then
        status=1
    fi
    note "repeat_stages: $(tail -1 "$out/repeat_stages.log")"
else
    note "not run  repeat_stages: out of time"
    status=1
fi
exit $status
