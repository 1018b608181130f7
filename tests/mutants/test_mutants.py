"""Every mutant still is the mistake that it says: whole, and applicable to the code as it is."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import killers, patch, tree
from tests.mutants.patch import Mutant, PatchError

_HEADER = "Mutant: does nothing\nMistake: none\nSeen in: our own\nBreaks: nothing\n\n"
_DIFF = "--- a/client/gate.py\n+++ b/client/gate.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"


_NO_CODE_IN_C = re.compile(r"/\*.*?\*/|\s+", re.DOTALL)
"""Comments and space."""


def _code(path: str, text: str) -> str:
    """What two files that compute the same have in common: the syntax tree, and of C the text without comments and space."""
    return ast.dump(ast.parse(text)) if path.endswith(".py") else _NO_CODE_IN_C.sub("", text)


@functools.cache
def _unchanged(path: str) -> str:
    """The code of a file without a mistake; many patches change the same one."""
    return _code(path, (tree.ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", patch.names())
def test_it_applies_and_is_a_change_of_code(name: str) -> None:
    """Without fuzz, at one place, in shipped code; what it makes in Python can be compiled, and is other code than before."""
    mutant = patch.read(name)
    for path, text in patch.mutated(mutant, tree.ROOT).items():
        assert path.split("/")[0] in tree.PRODUCT, f"{name} changes {path}, which is not shipped"
        assert _code(path, text) != _unchanged(path), f"{name} changes no code in {path}"
    for test in mutant.tests:
        assert (tree.ROOT / test.partition("::")[0]).exists(), f"{name} names {test}, which is not there"


def test_no_two_make_the_same_mistake() -> None:
    """Each is another change, and says so in other words."""
    mutants = [patch.read(name) for name in patch.names()]
    assert len({mutant.hunks for mutant in mutants}) == len({mutant.what for mutant in mutants}) == len(mutants) >= 25


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("one\ntwo, changed\n", "is not there any more"),
        ("one\ntwo\none\ntwo\n", "stands there 2 times"),
        (None, "there is no client"),
    ],
)
def test_a_patch_that_the_code_has_left_behind_says_what_to_do(tmp_path: Path, code: str | None, words: str) -> None:
    if code is not None:
        (tmp_path / "client").mkdir()
        (tmp_path / "client/gate.py").write_text(code)
    with pytest.raises(PatchError, match=words) as caught:
        patch.mutated(patch.parse("old", _HEADER + _DIFF), tmp_path)
    assert "put what `git diff` shows" in str(caught.value)


def test_a_line_of_the_log_is_no_test_that_failed() -> None:
    output = "ERROR    uvicorn.error:server.py:302 Cancel\nFAILED tests/a.py::test_b[c] - assert 0\n"
    assert killers.first_failed(1, output) == "tests/a.py::test_b[c]"


def test_a_copy_imports_its_own_code_under_every_name(tmp_path: Path) -> None:
    """Also where kvpool is installed in editable mode, which names the checkout; and the checkout stays as it is."""
    root = tmp_path / "copy"
    tree.copy(tree.ROOT, root)
    original = (tree.ROOT / "client/gate.py").read_text(encoding="utf-8")
    line = "class Gate:\n"
    mutant = Mutant("m", "", "", "", "", (), (patch.Hunk("client/gate.py", line, f"IS_MUTATED = True\n\n\n{line}"),))
    tree.mutate(mutant, root)
    assert (tree.ROOT / "client/gate.py").read_text(encoding="utf-8") == original
    for module in tree.modules(mutant.paths):
        program = f"import {module} as gate; assert gate.IS_MUTATED, gate.__file__"
        _python(["-c", program], root)
    _python(
        tree.import_command(
            root, ["cache_service/core/manager.py", "worker_service/cache/link_state.py", "client/gate.py"]
        )[1:],
        root,
    )


def _python(arguments: list[str], root: Path) -> None:
    found = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=tree.environment(root), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
