"""Generate the Python code of the protos in place, or check that the committed code is up to date.

python scripts/protos.py generate | check | lint
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SITE = Path(sysconfig.get_paths()["purelib"])
BIN = Path(sys.executable).parent


def generate(out: Path) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their typed stubs for every proto below `out`/kvpool/v1."""
    import grpc_tools

    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTOS}",
            f"-I{SITE}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--plugin=protoc-gen-mypy_grpc={BIN / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--pyi_out={out}",
            f"--mypy_grpc_out=only_async:{out}",
            *sources,
        ],
        check=True,
    )


def check() -> int:
    """Generate into a temporary folder and compare; returns the number of files that differ."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.py*")}
    committed = {
        path.relative_to(PROTOS): path.read_bytes() for path in PROTOS.rglob("*_pb2*") if path.suffix in (".py", ".pyi")
    }
    stale = sorted(str(name) for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        print(f"protos/{name} differs from the generated code: run `make docs` and commit", file=sys.stderr)
    return len(stale)


def lint() -> int:
    """Run `buf lint`, without a registry: the one foreign import is copied to the folder in buf.yaml."""
    target = ROOT / ".cache" / "googleapis" / "google" / "rpc"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(SITE / "google" / "rpc" / "status.proto", target)
    return subprocess.run([BIN / "buf", "lint"], cwd=ROOT).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["generate", "check", "lint"])
    action = parser.parse_args().action
    if action == "generate":
        generate(PROTOS)
    elif action == "check":
        sys.exit(1 if check() else 0)
    else:
        sys.exit(lint())


if __name__ == "__main__":
    main()
