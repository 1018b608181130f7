"""docs/API.md: the public names of kvpool.client, with their signatures and docstrings as they are in the source."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Final, NamedTuple

import kvpool.client
from kvpool.client import errors

SECTIONS: Final = {
    "Clients": ("Client", "SyncClient", "ClientConfig"),
    "Requests": ("GenerateOptions", "Message"),
    "Answers": (
        "GenerateStream",
        "SyncStream",
        "Completion",
        "Chunk",
        "Usage",
        "Times",
        "TokenLogprobs",
        "FinishReason",
    ),
    "Why a prompt misses": ("Explanation", "WorkerExplanation", "Miss", "MissCause", "ClosestPrompt"),
    "Models": ("Model",),
    "Watching": ("PictureView", "WorkerView", "PoolView", "ContentsView", "ContentNode", "ManagerAway"),
    "Errors": ("KvpoolError",),
}
"""Headings, and the names that are described in full below them. The other errors are a table."""
_INNER: Final = frozenset({"from_parts", "from_proto"})
"""Methods that the library calls itself."""

_HEAD: Final = """\
# The Python client

<!-- Written by `make docs` from the docstrings of client/; edit those. -->
"""


class Undocumented(Exception):
    """A public name has no docstring."""


class _Entry(NamedTuple):
    """A field, a property or a method."""

    signature: str
    text: str

    def lines(self) -> str:
        """As an item of a list."""
        return f"* **`{self.signature}`**\n  {_markdown(self.text, indent='  ')}"


def document() -> str:
    """The whole document. Raises Undocumented."""
    parts = [_HEAD, _require(kvpool.client.__doc__, "kvpool.client") + "\n"]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        parts += [_describe(name) for name in names]
    parts.append(_table_of_errors())
    return "\n".join(parts)


def described_names() -> set[str]:
    """All names that the document has."""
    return {name for names in SECTIONS.values() for name in names} | {error.__name__ for error in _errors()}


def _errors() -> list[type[errors.KvpoolError]]:
    found = (getattr(kvpool.client, name) for name in kvpool.client.__all__)
    return [item for item in found if isinstance(item, type) and item.__base__ is errors.KvpoolError]


def _table_of_errors() -> str:
    rows = [f"| `{error.__name__}` | {_flat(_require(error.__doc__, error.__name__))} |" for error in _errors()]
    return "\n".join(["Its subclasses:\n", "| error | meaning |", "|---|---|", *rows, ""])


def _describe(name: str) -> str:
    public = getattr(kvpool.client, name)
    if not isinstance(public, type):
        return f"### {name}\n\n{_markdown(_alias_text(name))}\n"
    entries = list(_entries(public))
    if issubclass(public, errors.KvpoolError):
        entries = [entry for entry in entries if not entry.signature.startswith(name)]
    listed = "\n".join(entry.lines() for entry in entries)
    return f"### {name}\n\n{_markdown(_require(public.__doc__, name))}\n\n{listed}\n"


def _entries(public: type) -> Iterator[_Entry]:
    node, module = _source(public)
    for base in map(ast.unparse, node.bases):
        # What a public class inherits from an inner one belongs to its description. (TypedDict hides its bases at run time.)
        inherited = vars(module).get(base)
        ours = ("kvpool.client", "kvpool.protocol")
        if inherited is not None and inherited.__module__.startswith(ours) and base not in described_names():
            yield from _entries(inherited)
    blocking: list[FunctionType] = []
    for index, item in enumerate(node.body):
        if isinstance(item, ast.Assign) and inspect.isfunction(value := vars(public)[ast.unparse(item.targets[0])]):
            blocking.append(inspect.unwrap(value))
        elif isinstance(item, (ast.AnnAssign, ast.Assign)) and (signature := _field(item, module)):
            yield _Entry(signature, _require(_string_after(node.body, index), f"{public.__name__}.{signature}"))
        elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _method(public, item)
    if blocking:
        yield _blocking_forms(blocking)


def _blocking_forms(methods: list[FunctionType]) -> _Entry:
    """The methods of SyncClient that are made of those of Client."""
    (owner,) = {method.__qualname__.partition(".")[0] for method in methods}
    names = "`, `".join(method.__name__ for method in methods)
    return _Entry(names, f"As the methods of {owner} with these names, without `await`.")


def _method(public: type, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Entry]:
    if function.name == "__init__":
        text = ast.get_docstring(function)
        if text:
            yield _Entry(f"{public.__name__}({_parameters(function)})", text)
        for index, item in enumerate(function.body):
            attribute = item.target if isinstance(item, ast.AnnAssign) else None
            if isinstance(attribute, ast.Attribute) and not attribute.attr.startswith("_"):
                yield _Entry(attribute.attr, _require(_string_after(function.body, index), attribute.attr))
    elif not function.name.startswith("_") and function.name not in _INNER:
        text = _require(ast.get_docstring(function), f"{public.__name__}.{function.name}")
        result = ast.unparse(function.returns) if function.returns else "None"
        decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
        if "property" in decorators:
            yield _Entry(f"{function.name}: {result}", text)
        else:
            lead = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
            lead += "classmethod " if "classmethod" in decorators else ""
            yield _Entry(f"{lead}{function.name}({_parameters(function)}) -> {result}", text)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = re.sub(r"^(self|cls)(, )?", "", ast.unparse(function.args))
    return re.sub(r"(?<=: )([^=]+)=", r"\1 = ", text)


def _field(item: ast.AnnAssign | ast.Assign, module: ModuleType) -> str:
    """`name: type = default`, constants by their values; empty for a private one."""
    target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
    if not isinstance(target, ast.Name) or target.id.startswith("_"):
        return ""
    if isinstance(item.value, ast.Name):
        item.value = ast.Constant(vars(module)[item.value.id])
    return ast.unparse(item)


def _source(public: type) -> tuple[ast.ClassDef, ModuleType]:
    (node,) = ast.parse(inspect.getsource(public)).body
    assert isinstance(node, ast.ClassDef)
    return node, sys.modules[public.__module__]


def _alias_text(name: str) -> str:
    """The string below `name = …` in the module of that name."""
    module = sys.modules[f"kvpool.client.{name.lower()}s"]
    body = ast.parse(inspect.getsource(module)).body
    for index, item in enumerate(body):
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == name:
            return _require(_string_after(body, index), name)
    raise Undocumented(name)


def _string_after(body: list[ast.stmt], index: int) -> str | None:
    following = body[index + 1] if index + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        text = following.value.value
        return inspect.cleandoc(text) if isinstance(text, str) else None
    return None


def _require(text: str | None, name: str) -> str:
    if not text:
        raise Undocumented(f"{name} is public and has no docstring")
    return inspect.cleandoc(text)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str, indent: str = "") -> str:
    """A docstring's paragraphs."""
    return f"\n\n{indent}".join(_flat(paragraph) for paragraph in text.split("\n\n"))
