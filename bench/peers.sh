#!/usr/bin/env bash
# Puts the peers that the benchmarks compare with into .venv-peers, an environment of their own; takes a minute or two.
#
# vLLM: its wheel is unpacked, not installed (an installation would bring CUDA), and only its Python files are kept: enough for
# its KVCacheManager, which is plain Python. transformers, the other peer, is in .venv already.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv-peers
readonly VLLM=vllm==0.33.0
readonly READY=$VENV/.ready-$VLLM
# What importing vllm.v1.core pulls in. torch is pinned: any other would come with CUDA.
readonly NEEDED=(
  torch==2.13.0 transformers==5.23.0 numpy xxhash
  aiohttp cachetools cbor2 cloudpickle fastapi llguidance msgspec openai openai_harmony packaging partial-json-parser
  pillow prometheus-client psutil py-cpuinfo pybase64 pydantic pyzmq regex requests urllib3 uvloop xgrammar
)

if [[ -e $READY ]]; then
  echo "$VENV is there already; remove it to build it again"
  exit
fi
echo "[1/3] environment $VENV"
"${PYTHON:-python3}" -m venv "$VENV"
echo "[2/3] packages that vLLM's manager imports: torch for the CPU and ${#NEEDED[@]} small ones"
"$VENV/bin/pip" install --disable-pip-version-check --constraint constraints.txt "${NEEDED[@]}"
echo "[3/3] $VLLM, unpacked: about 340 MB to fetch, of which the Python files are kept"
"$VENV/bin/pip" download --disable-pip-version-check --no-deps --dest "$VENV/wheels" "$VLLM"
"$VENV/bin/python" - "$VENV"/wheels/vllm-*.whl "$VENV/vllm" <<'PYTHON'
import pathlib, sys, sysconfig, zipfile

wheel, folder = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])
# Makes `import vllm` find it, and importlib.metadata its version.
(pathlib.Path(sysconfig.get_paths()["purelib"]) / "vllm.pth").write_text(f"{folder.resolve()}\n")
PYTHON
rm -r "$VENV/wheels"
PYTHONWARNINGS=ignore "$VENV/bin/python" -c '
from vllm.v1.core.kv_cache_manager import KVCacheManager
print("vLLM imports:", KVCacheManager.__module__)'
touch "$READY"
