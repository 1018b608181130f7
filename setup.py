"""Compiles the native step, once for each kind of CPU and number type; all else is in pyproject.toml.

A build is a library that ctypes opens: it does not depend on the version of Python. What cannot be compiled is left out, with a
warning, or ends the build if KVPOOL_NATIVE=required.
"""

from __future__ import annotations

import os
import platform
import runpy
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError as BuildFailed
from setuptools.modified import newer_group

FOLDER = "worker_service/native/cpu"
TARGETS = runpy.run_path(f"{FOLDER}/targets.py")
COMPILER = TARGETS["find_compiler"]()
NEEDED = [*glob(f"{FOLDER}/csrc/*.h"), f"{FOLDER}/targets.py", "setup.py"]
OPTIONAL = os.environ.get("KVPOOL_NATIVE") != "required"
COST = "A CPU with no other build that it can run computes with torch: steps take two to six times as long."


def builds() -> list[Extension]:
    """For this machine. Their names are those of files, not of modules."""
    wanted = [one for one in TARGETS["TARGETS"] if sys.platform == "linux" and one.machine == platform.machine()]
    return [
        Extension(
            f"kvpool.worker_service.native.cpu.builds.{target.file_name(number_type).removesuffix('.so')}",
            [f"{FOLDER}/csrc/step.c"],
            depends=NEEDED,
            extra_compile_args=TARGETS["flags"](COMPILER, target, number_type) if COMPILER else [],
            optional=OPTIONAL,
        )
        for target in wanted
        for number_type in target.number_types
    ]


class BuildStep(build_ext):
    """One command of the compiler for each build, with our flags and not Python's."""

    def finalize_options(self) -> None:
        self.parallel = self.parallel or os.cpu_count()
        super().finalize_options()

    def run(self) -> None:
        if self.inplace:
            self.mkpath(f"{FOLDER}/builds")
            self.extensions = [one for one in self.extensions if self.force or self._is_old(one)]
        super().run()

    def build_extensions(self) -> None:
        if COMPILER:
            super().build_extensions()
        lacking = [one for one in self.extensions if self._is_old(one)]
        if lacking:
            why = "" if COMPILER else "; there is no C compiler: install gcc, or set CC to one's command"
            names = ", ".join(one.name.rpartition(".")[2] for one in lacking)
            problem = f"the native step was not built for {names}{why}. {COST}"
            if not OPTIONAL:
                raise BuildFailed(problem)
            self.warn(problem)

    def build_extension(self, ext: Extension) -> None:
        if self.force or self._is_old(ext):
            path = self.get_ext_fullpath(ext.name)
            self.mkpath(os.path.dirname(path))
            self.spawn([*COMPILER, *ext.extra_compile_args, *ext.sources, "-o", path, "-lm"])

    def _is_old(self, ext: Extension) -> bool:
        """Or not there."""
        return bool(newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name)))

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class PlatformWheel(bdist_wheel):
    """For every Python on this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(ext_modules=builds(), cmdclass={"build_ext": BuildStep, "bdist_wheel": PlatformWheel})
