"""Fetches a model by its hub id, once, into the hub's shared cache; later it is found there, also offline.

Only files that are loaded are fetched: config, tokenizer, chat template, and safetensors or one GGUF file. Small files first, so
that complete weights in the cache imply a complete model.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..errors import ModelError
from ..progress import Progress, heartbeat
from .files import QUANTIZER_FILES, check_small_files, only_gguf, safetensors_names

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
_SMALL_FILES = [
    "config*.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.json",
    "chat_template*.jinja",
    "model.safetensors.index.json",
    *QUANTIZER_FILES,
]
_SUBFOLDERS = ["*/*"]
_MAIN = "main"
# Requests contain the token and signed URLs: they are not logged at any level.
_CHATTY = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "hpack", "urllib3", "filelock")
_TIMEOUT_S = 5.0
_NO_RIGHT = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)


class HubId(NamedTuple):
    """A model repository on the hub, at a revision."""

    repo: str
    """org/name."""
    revision: str
    """A branch, tag or commit."""

    @property
    def name(self) -> str:
        """Name shown to users, without the revision if it is main."""
        return self.repo if self.revision == _MAIN else f"{self.repo}@{self.revision}"


def parse_hub_id(text: str) -> HubId | None:
    """`org/name` or `org/name@revision`; None for other texts, such as paths."""
    match = _ID.fullmatch(text)
    if match is None or match["repo"].endswith(".gguf"):
        return None
    return HubId(match["repo"], match["revision"] or _MAIN)


def fetch_model(hub_id: HubId, progress: Progress) -> Path:
    """The folder of the model in the hub's cache, or its one GGUF file. Fetches missing files; blocking.

    If the hub cannot be reached, a complete cached copy is used, and progress gets a line. Raises ModelError.
    """
    progress(f"asking {_endpoint()} for {hub_id.name}")
    with _quiet():
        try:
            sizes = _list_files(hub_id)
        except Exception as error:  # the exceptions of the library's network layer differ between releases
            problem = _explain(error, hub_id)
            if not problem.is_final:
                return _cached_instead(hub_id, problem, progress)
            has_copy = isinstance(_find_cached(hub_id), Path)
            advice = " A cached copy is there; HF_HUB_OFFLINE=1 uses it." if has_copy else ""
            raise ModelError(problem.text + advice) from error
        _check_loadable(hub_id, sizes)
        try:
            return _fetch(hub_id, sizes, progress)
        except ModelError:
            raise
        except Exception as error:
            problem = _explain(error, hub_id)
            raise ModelError(f"Fetching {hub_id.name} failed: {problem.text}") from error


def fetch_config(hub_id: HubId, progress: Progress) -> Path:
    """The folder in the hub's cache with the model's config.json, or its one GGUF file if that is cached; fetches no weights.

    If the hub cannot be reached, the cached files are used. Raises ModelError as fetch_model does.
    """
    progress(f"asking {_endpoint()} for the config of {hub_id.name}")
    with _quiet():
        try:
            folder = _snapshot(hub_id.repo, hub_id.revision, ["config.json"])
        except Exception as error:  # as in fetch_model
            raise ModelError(_explain(error, hub_id).text) from error
    if (folder / "config.json").is_file():
        return folder
    if ggufs := sorted(folder.glob("*.gguf")):
        return ggufs[0] if len(ggufs) == 1 else folder
    raise ModelError(
        f"{hub_id.name} on the hub has no config.json: its needs are unknown without its files. Fetch them "
        f"(`hf download {hub_id.repo}` prints the path) and give the path."
    )


# -- fetching


def _list_files(hub_id: HubId) -> dict[str, int]:
    """The files of the repo's top folder and their sizes in bytes."""
    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _TIMEOUT_S)
    info = HfApi().model_info(hub_id.repo, revision=hub_id.revision, timeout=timeout, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or [] if "/" not in file.rfilename}


def _check_loadable(hub_id: HubId, names: dict[str, int]) -> None:
    """Make the checks of a local folder before files are fetched. Raises ModelError."""
    where = f"{hub_id.name} on the hub"
    if only_gguf(where, names) is None and "config.json" not in names:
        raise ModelError(
            f"{where} has weights but no config.json: it is no model by itself. Give the model it belongs to."
        )


def _fetch(hub_id: HubId, sizes: dict[str, int], progress: Progress) -> Path:
    folder = _snapshot(hub_id.repo, hub_id.revision, _SMALL_FILES)
    check_small_files(folder)  # before weights are fetched, which a quantized model would be refused for
    gguf = only_gguf(hub_id.name, sizes)
    weights = [gguf] if gguf else safetensors_names(f"{hub_id.name} on the hub", folder, sizes)
    missing = [name for name in weights if not (folder / name).is_file()]
    at_commit = f"{hub_id.name} (commit {folder.name[:12]})"
    if missing:
        num_bytes = sum(sizes[name] for name in missing)
        _check_disk(folder, num_bytes, at_commit)
        progress(f"fetching {len(missing)} of {len(weights)} weights files of {at_commit}, {_size(num_bytes)}")
        started = time.monotonic()
        before = _bytes_in(blobs := folder.parent.parent / "blobs")

        def with_bytes(line: str) -> None:
            progress(f"{line}, {_size(min(_bytes_in(blobs) - before, num_bytes))} of {_size(num_bytes)}")

        with heartbeat(with_bytes, f"fetching {hub_id.name}"):
            # By commit, not by name: the branch may have changed since the small files were fetched.
            _snapshot(hub_id.repo, folder.name, [glob.escape(name) for name in missing])
        progress(f"fetched {hub_id.name} in {time.monotonic() - started:.0f} s; kept in {folder}")
    else:
        progress(f"{at_commit} is in the hub's cache, nothing to fetch")
    if lacks := [name for name in weights if not (folder / name).is_file()]:
        raise ModelError(
            f"{hub_id.name} has changed on the hub while it was fetched ({lacks[0]} is gone): start again."
        )
    return folder / gguf if gguf else folder


def _snapshot(repo: str, revision: str, patterns: list[str], *, offline: bool = False) -> Path:
    """The folder of the repo at a commit, with the files of its top folder that match."""
    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_SUBFOLDERS,
            etag_timeout=_TIMEOUT_S,
            local_files_only=offline,
        )
    )


def _check_disk(folder: Path, num_bytes: int, what: str) -> None:
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise ModelError(
            f"{what} needs {_size(num_bytes)} on the disk of {constants.HF_HUB_CACHE}, which has {_size(free)} free: make room, "
            "or set HF_HOME to a folder on another disk."
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # renamed or removed meanwhile
            continue
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


# -- offline


def _cached_instead(hub_id: HubId, problem: _Problem, progress: Progress) -> Path:
    cached = _find_cached(hub_id)
    if isinstance(cached, Path):
        commit = (cached if cached.is_dir() else cached.parent).name
        progress(f"{problem.text} Using the cached copy of {hub_id.name}, commit {commit[:12]}.")
        return cached
    raise ModelError(
        f"There is no folder {hub_id.name!r}; as a hub id it needs the hub or a cached copy. {problem.text} {cached} "
        f"Give a model folder, or fetch it where there is a network (`hf download {hub_id.repo}`) and copy the cache."
    )


def _find_cached(hub_id: HubId) -> Path | str:
    """The complete cached model, or a sentence about what is missing."""
    nothing = f"{constants.HF_HUB_CACHE} has no cached copy of it."
    try:
        folder = _snapshot(hub_id.repo, hub_id.revision, _SMALL_FILES, offline=True)
    except LocalEntryNotFoundError:
        return nothing
    except Exception as error:  # newer releases raise an exception for missing files that older ones lack
        return f"The cached copy in {constants.HF_HUB_CACHE} cannot be used: {_redacted(str(error))}"
    if not folder.is_dir():
        return nothing
    names = {file.name for file in folder.iterdir() if file.is_file()}
    where = f"The cached copy {folder}"
    try:
        if gguf := only_gguf(where, names):
            return folder / gguf
        safetensors_names(where, folder, names)
    except ModelError as error:
        return f"{error} It is incomplete."
    return folder if "config.json" in names else f"{where} is incomplete: it has no config.json."


# -- what went wrong


class _Problem(NamedTuple):
    text: str
    """A sentence or two: what failed and what to change."""
    is_final: bool
    """Whether the hub has refused: then a cached copy is not silently used instead."""


def _explain(error: Exception, hub_id: HubId) -> _Problem:
    """Explain an error of the library. The order of the cases matters: its exceptions are subclasses of each other."""
    causes = list(_chain(error))

    def has(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    status = next((cause.response.status_code for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    no_room = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
    # With a file name, because a firewall can cause the same errno for a connection.
    no_right = any(isinstance(cause, OSError) and cause.errno in _NO_RIGHT and cause.filename for cause in causes)
    host = _endpoint()
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if has(OfflineModeIsEnabled):
        return _Problem(
            f"{host} is not asked because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it to fetch models.",
            False,
        )
    if no_room:
        return _Problem(
            f"the disk of {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME to a folder on another disk.",
            True,
        )
    if no_right:
        text = f"{constants.HF_HUB_CACHE} cannot be written: set HF_HOME to a folder of yours."
        return _Problem(text, True)
    if has(GatedRepoError):
        text = f"{hub_id.repo} is gated: accept its conditions on {host}/{hub_id.repo}, then {log_in}."
        return _Problem(text, True)
    if has(RevisionNotFoundError):
        return _Problem(f"{host} has {hub_id.repo}, but no revision {hub_id.revision!r} of it.", True)
    if has(RepositoryNotFoundError):
        text = f"There is no folder {hub_id.name!r}, and {host} knows no model {hub_id.repo!r} or does not show it to you: "
        return _Problem(f"{text}check the name, or, if it is private, {log_in}.", True)
    if status in (401, 403):
        return _Problem(
            f"{host} refuses access to {hub_id.repo} ({status}): {log_in} with a token that may read it.", True
        )
    if isinstance(error, HFValidationError):
        return _Problem(f"{hub_id.name!r} is neither a folder nor a name that the hub allows.", True)
    if status is not None:
        return _Problem(f"{host} answers with status {status}; try again later, or set HF_ENDPOINT to a mirror.", False)
    text = f"{host} cannot be reached ({_redacted(f'{type(causes[-1]).__name__}: {causes[-1]}')}); "
    return _Problem(f"{text}check the network and proxy, or set HF_ENDPOINT to a mirror.", False)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes: explicit ones (`from`), else the error being handled at the time."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _endpoint() -> str:
    """The hub's URL without user name and password."""
    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _redacted(text: str) -> str:
    """One line, with URLs stripped of queries and credentials."""
    text = re.sub(r"://[^/\s@]*@", "://", " ".join(text.split()))
    return re.sub(r"\?\S+", "", text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and log lines of the library inside."""
    shown = not are_progress_bars_disabled()
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    if shown:
        disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            enable_progress_bars()
