#!/bin/bash
# What hangs on torch's version, run with the torch of one environment and compared with that of another:
#   soak/versions.sh OTHER/bin/python .venv/bin/python
# make versions TORCH=2.14.1 makes the environment and keeps the log.
set -o pipefail
other=$1 reference=$2 failed=0
say() { echo; echo "== $*"; "$@" || { echo "FAILED: $*"; failed=1; }; }

$other - <<'PYTHON'
import platform, time
import torch, transformers
print(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "· Python", platform.python_version(), "· torch", torch.__version__, "· CUDA", torch.version.cuda, "· a GPU is here:", torch.cuda.is_available(), "· transformers", transformers.__version__)
PYTHON
say "$other" -m pytest -p no:xdist -q --no-header tests/prediction tests/searching tests/sources tests/test_memory_stats.py
say "$other" -m pytest -p no:xdist -q --no-header -m soak tests/soak/test_predicted_notebooks.py tests/soak/test_torch_internals.py
say "$other" -m pytest -p no:xdist -q --no-header notebooks/01_first_steps.ipynb notebooks/05_before_you_have_a_gpu.ipynb
say "$other" examples/demo.py

folder=$(mktemp -d)
say "$reference" soak/peaks.py >"$folder/reference"
say "$other" soak/peaks.py >"$folder/other"
cat "$folder/reference"
rows=$(grep -c '[0-9]$' "$folder/other")
echo
# the first three columns: what a torch asks besides, and has to assume, may differ
if diff <(awk '/[0-9]$/ {print $1, $2, $3}' "$folder/reference") <(awk '/[0-9]$/ {print $1, $2, $3}' "$folder/other"); then
    echo "both peaks of $rows workloads are equal to the byte in both"
else
    echo "FAILED: peaks differ"; failed=1
fi
diff <(grep '[0-9]$' "$folder/reference") <(grep '[0-9]$' "$folder/other") || echo "(the lines above: requests and assumptions differ)"
rm -r "$folder"
exit $failed
