"""Chooses the store that --election names."""

from __future__ import annotations

from ..settings import ManagerSettings
from .epoch import EpochStore, StateError
from .file import FileEpochs


def choose_store(settings: ManagerSettings) -> EpochStore:
    """Make the store. Raises StateError if something that it needs is missing or, without --election, if another manager leads."""
    if settings.election is None:
        return FileEpochs.open(settings.state_folder)
    kind, _, name = settings.election.partition(":")
    if kind == "file":
        return FileEpochs(settings.state_folder)
    try:
        from .kubernetes import LeaseEpochs, LeaseName  # imports an HTTP client, which nothing else here needs
    except ModuleNotFoundError as error:
        raise StateError(
            f"--election kubernetes needs the package {error.name}: pip install 'kvpool[kubernetes]'"
        ) from error
    namespace, _, lease = name.partition("/")
    return LeaseEpochs(LeaseName(namespace, lease), duration=settings.leader_lease_seconds, api=settings.kubernetes_api)
