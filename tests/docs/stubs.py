"""The stubs of examples/stubs/README.md in other languages.

`make test SUITE=stubs` runs this file. `make test` does not collect it: it needs compilers and a package registry.
"""

from __future__ import annotations

import shutil

import pytest

from tests.docs.protocol_shell import ProtocolShell


@pytest.mark.parametrize(
    ("language", "programs", "packages"),
    [
        ("JavaScript", ["node", "npm"], "nodejs npm"),
        (
            "Go",
            ["go", "protoc-gen-go", "protoc-gen-go-grpc"],
            "golang-go protoc-gen-go-1-5 protoc-gen-go-grpc golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev",
        ),
    ],
    ids=["JavaScript", "Go"],
)
def test_the_stubs_compile_and_call_the_manager(
    language: str, programs: list[str], packages: str, protocol_shell: ProtocolShell
) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.fail(f"{language} needs {', '.join(missing)}; on Debian: apt-get install {packages}", pytrace=False)
    commands, printed = protocol_shell.commands(language)
    assert protocol_shell.run(commands).endswith(printed)
