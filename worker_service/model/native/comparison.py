"""`--runtime auto` where torch may be faster than the native step: both are timed once, and the choice is kept.

Where the step uses the fastest instructions of the CPU, it is faster than torch, and nothing is timed. But a CPU may have a unit
that multiplies matrices, which torch uses and the step does not, because Linux refuses it, or there was no compiler for
it. Then torch
computes prompts in a fraction of the time, and the step may still be ahead in decodes, which read more than they multiply.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ValidationError

from ...native.cpu import cpu_info
from ...native.cpu.library import Library
from ...native.cpu.targets import NumberType
from ..errors import NotNative
from ..forward.contract import Runtime
from ..placement import Prepared, dtype_name
from ..progress import Progress
from ..settings import ModelSettings
from ..source.cache_dir import write_atomically
from .load import NATIVE_DTYPES, num_threads
from .timing import Measure, StepSeconds, TimedWorkload


class Choice(BaseModel, frozen=True):
    """The faster runtime, and the figures of both."""

    key: dict[str, str | int]
    """All that the choice depends on."""
    runtime: Literal["native", "torch"]
    native: StepSeconds
    torch: StepSeconds


@dataclass(frozen=True, slots=True)
class ChoiceFile:
    """The file that keeps the choice of one key."""

    cache_dir: Path
    key: dict[str, str | int]
    """See Choice."""

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return self.cache_dir / "runtimes" / f"{digest[:32]}.json"

    def read(self) -> Choice | None:
        """The kept choice; None if there is none that is whole."""
        try:
            found = Choice.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return None
        return found if found.key == self.key else None

    def keep(self, choice: Choice) -> None:
        """Replace the file as a whole. Raises OSError."""
        write_atomically(self.path, (choice.model_dump_json(indent=1) + "\n").encode())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares both runtimes for one model and its worker."""

    fingerprint: str
    dtype: torch.dtype
    block_size: int
    workload: TimedWorkload
    cache_dir: Path
    progress: Progress
    measure: Measure

    def is_open(self, library: Library) -> bool:
        """Whether torch may be faster than this step, and no earlier start has found out."""
        return self._is_needed(library) and self._file(library).read() is None

    def question(self) -> str:
        """Why torch may be faster, for a line of the log."""
        return f"this CPU has {matrix_unit(self.dtype)}, which torch uses and the native step does not"

    def follow_kept(self, library: Library) -> None:
        """Called before weights are packed. Raises NotNative if an earlier start chose torch."""
        if not self._is_needed(library):
            return
        file = self._file(library)
        choice = file.read()
        if choice is None:
            return
        found = f"{self._describe(choice)}; kept in {file.path}"
        if choice.runtime == "torch":
            raise NotNative(found)
        self.progress(f"runtime: native; not torch: {found}")

    def time(self, name: str, runtime: Runtime) -> StepSeconds | None:
        """None with a line to progress if it fails: then there is nothing to compare."""
        try:
            return self.measure(runtime, self.block_size, self.workload)
        except Exception as error:  # models raise all kinds of errors
            self.progress(f"runtime: native; {name} could not be timed: {type(error).__name__}: {error}")
            return None

    def choose(self, library: Library, native: StepSeconds, torch_figures: StepSeconds) -> Choice:
        """The runtime that takes less time for the workload, kept. What another worker has kept meanwhile comes first."""
        file = self._file(library)
        choice, how = file.read(), f"another worker's choice, kept in {file.path}"
        if choice is None:
            is_torch = torch_figures.total(self.workload) < native.total(self.workload)
            faster: Literal["native", "torch"] = "torch" if is_torch else "native"
            choice = Choice(key=file.key, runtime=faster, native=native, torch=torch_figures)
            try:
                file.keep(choice)
                how = f"timed now, kept in {file.path}"
            except OSError as error:
                why = f"{file.path} cannot be written: {error.strerror}"
                how = f"timed at each start, not kept: {why}. Give another --cache-dir, or mend this one"
        other = "native" if choice.runtime == "torch" else "torch"
        self.progress(f"runtime: {choice.runtime}; not {other}: {self._describe(choice)}; {how}")
        return choice

    def _is_needed(self, library: Library) -> bool:
        return not library.has_tiles and matrix_unit(self.dtype) is not None

    def _describe(self, choice: Choice) -> str:
        figures = {"native": choice.native, "torch": choice.torch}
        shown = ", ".join(
            f"{name} {found.total(self.workload):.3g} s (prefill {found.prefill:.3g} s, decode {found.decode:.3g} s)"
            for name, found in figures.items()
        )
        return f"{choice.runtime} is faster on this CPU with {matrix_unit(self.dtype)}, for {self.workload}: {shown}"

    def _file(self, library: Library) -> ChoiceFile:
        """Machines may share a cache folder, and the next start may have other CPUs, limits or libraries."""
        cpu = hashlib.sha256(json.dumps(cpu_info.identity()).encode()).hexdigest()
        key: dict[str, str | int] = {
            "fingerprint": self.fingerprint,
            "dtype": dtype_name(self.dtype),
            "block_size": self.block_size,
            **self.workload._asdict(),
            "step": library.path.name,
            "build": hashlib.sha256(library.path.read_bytes()).hexdigest(),
            "torch": str(torch.__version__),
            "cpu": cpu,
            "native_threads": num_threads(),
            "torch_threads": torch.get_num_threads(),
        }
        return ChoiceFile(self.cache_dir, key)


def expected_runtime(settings: ModelSettings, prepared: Prepared, *, is_recurrent: bool = False) -> str:
    """What a start can be expected to choose, without a step and weights: for a user. is_recurrent: some layers are."""
    dtype = prepared.dtype
    if prepared.device.type != "cpu" or settings.runtime == "torch":
        return "torch"
    if settings.runtime == "native" or settings.quantize != "none":
        return "native"
    if prepared.max_encoder_tokens is not None:
        return "torch: the native step computes no encoder-decoder models"
    if is_recurrent:
        return "torch: the native step does not compute recurrent layers"
    if dtype not in NATIVE_DTYPES:
        return f"torch: the native step does not compute {dtype_name(dtype)}"
    unit = matrix_unit(dtype)
    if unit is None:
        return "native if it computes the model, else torch"
    return f"native if it computes the model and, where only torch uses {unit}, is not slower; else torch"


def matrix_unit(dtype: torch.dtype) -> str | None:
    """The CPU flag of a unit that multiplies matrices of this type; None: there is none."""
    name: NumberType = "bfloat16" if dtype == torch.bfloat16 else "float32"
    return cpu_info.matrix_unit(name) if dtype in NATIVE_DTYPES else None
