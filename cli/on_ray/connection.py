"""Connects this command to the Ray cluster."""

from __future__ import annotations

from . import before_ray  # noqa: F401

# isort: split
import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final

import ray
from ray.exceptions import RayError

from kvpool.client.errors import Unavailable

_NONE_RUNS: Final = "Could not find any running Ray instance"
"""Beginning of Ray's error when it has found no address. Other errors mean that an address does not answer."""


def connect(address: str | None, namespace: str, *, is_quiet: bool = True, own_cpus: int | None = None) -> bool:
    """Connect to the Ray cluster. With `own_cpus`, if none runs here, start one of a single node on the loopback, which ends with
    this process; returns whether that was done. Raises Unavailable."""
    # Our actors are removed before their placement group, so that the advice against this does not apply.
    logging.getLogger("ray.actor").addFilter(lambda record: "restartable detached actor" not in record.getMessage())
    options: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": not is_quiet,
        "logging_level": logging.WARNING,
    }
    try:
        ray.init(address=address or "auto", **options)
        return False
    except ConnectionError as error:
        if own_cpus is None or address is not None or not str(error).startswith(_NONE_RUNS):
            raise _no_ray(address, error) from error
    except (RuntimeError, ValueError, RayError) as error:
        raise _no_ray(address, error) from error
    try:
        ray.init(address="local", num_cpus=own_cpus, include_dashboard=False, **options)
    except (RuntimeError, ValueError, RayError) as error:
        raise Unavailable(f"Ray does not start on this machine: {_first_line(error)}", reason="NO_RAY") from error
    return True


def disconnect() -> None:
    """Disconnect from Ray; the actors stay."""
    ray.shutdown()


@contextlib.contextmanager
def ray_errors() -> Iterator[None]:
    """Turn errors of Ray into Unavailable."""
    try:
        yield
    except (RayError, RuntimeError, ValueError) as error:
        raise Unavailable(
            f"Ray has failed: {_first_line(error)}; `ray status` shows its nodes, and `kvpool ray status` what runs on them",
            reason="RAY_FAILED",
        ) from error


def _no_ray(address: str | None, error: Exception) -> Unavailable:
    where = f"at {address}" if address else "on this machine"
    return Unavailable(
        f"no Ray cluster answers {where} ({_first_line(error)}); start its nodes with `ray start`, and run this on one of them, or "
        "name the cluster with --address",
        reason="NO_RAY",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
