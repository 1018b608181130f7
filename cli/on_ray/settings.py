"""Settings of `kvpool ray up`: flags, `KVPOOL_RAY_*` variables, [ray] of a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import CliToggleFlag, SettingsConfigDict

from kvpool.process.address import DEFAULT_PORT
from kvpool.process.settings import ProcessSettings

from ..launch.worker_flags import WorkerFlags
from ..settings import GatewayPort

DEFAULT_NAMESPACE: Final = "kvpool"
SHARED_MANAGERS: Final = 2
"""Default number of managers with an election: one leads, one stands by."""


class RaySettings(ProcessSettings):
    """A manager and its workers on the nodes of a Ray cluster, which places them and starts them again when they die.

    Ctrl-C lets all of them finish and leave; with --detach they go on until `kvpool ray down`. Given while the cluster runs, with
    another --workers, the cluster grows or shrinks. Each process listens on the address of its Ray node. Ray reports usage to its
    makers unless RAY_USAGE_STATS_ENABLED=0 is set where its nodes are started; a Ray that is started here does not.

    Flags that are not listed here go to each worker, e.g. --model, --num-blocks or --scheduling-policy: `kvpool worker --help`
    lists them. The KVPOOL_* variables of this command are those of all the processes (KVPOOL_MANAGER_LEASE_SECONDS=6,
    KVPOOL_GATEWAY_API_KEY_FILE=…); files that they name must be on every node.

    Each setting listed here is also a variable, e.g. KVPOOL_RAY_WORKERS=2, and a line below [ray] of the file that --config names,
    e.g. workers = 2.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_RAY_", cli_prog_name="kvpool ray up")
    table: ClassVar[str] = "ray"

    address: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        default=None,
        description="host:port of the Ray cluster; this machine must be one of its nodes. Default: $RAY_ADDRESS, else the one that "
        "runs here, else one on 127.0.0.1 that ends with this command.",
    )
    namespace: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        default=DEFAULT_NAMESPACE, description="Ray namespace of the processes: one cluster of kvpool in each."
    )
    workers: int = Field(default=1, ge=1, le=4096, description="Workers, spread over the nodes.")
    cpus_per_worker: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="CPU cores that Ray reserves for a worker, and threads that it computes with.",
    )
    gpus_per_worker: int | None = Field(
        default=None,
        ge=0,
        le=1,
        description="GPUs that Ray reserves for a worker. Default: 1 if the Ray cluster has any, else 0.",
    )
    port: int = Field(
        default=DEFAULT_PORT,
        ge=0,
        le=65535,
        description="TCP port of the first manager; the others have the next ones. 0: any free one, at each start another.",
    )
    state_dir: Path | None = Field(
        default=None,
        description="Folder on a disk that all nodes share, where the managers keep the epoch and elect the one that leads. "
        "Default: on the node of the one manager, unless --election kubernetes keeps it.",
    )
    election: Annotated[str, StringConstraints(pattern=r"^(file|kubernetes:[a-z0-9.-]+/[a-z0-9.-]+)$")] | None = Field(
        default=None,
        description="As of `kvpool manager`: kubernetes:NAMESPACE/NAME where Ray runs on Kubernetes. Default: file, in "
        "--state-dir.",
    )
    managers: int | None = Field(
        default=None,
        ge=1,
        le=5,
        description="Managers, each on another node: one leads, the others stand by. More than one need --state-dir or --election "
        f"kubernetes. Default: {SHARED_MANAGERS} with these, else one.",
    )
    http: GatewayPort | None = Field(
        default=None,
        description="TCP port of a gateway: OpenAI's API, and a page that shows the cache live. Beyond loopback it needs "
        "KVPOOL_GATEWAY_API_KEY_FILE or KVPOOL_GATEWAY_NO_API_KEY. Default: no gateway.",
    )
    detach: CliToggleFlag[bool] = Field(
        default=False, description="End when all is ready, and leave the cluster running: `kvpool ray down` ends it."
    )

    @model_validator(mode="after")
    def _managers_share_an_election(self) -> RaySettings:
        if self.election == "file" and self.state_dir is None:
            raise ValueError("--election file needs --state-dir, a folder on a disk that all nodes share")
        if (self.managers or 1) > 1 and not self.is_shared:
            raise ValueError(
                f"--managers {self.managers} need an election: give --state-dir, a folder on a disk that all nodes share, or "
                "--election kubernetes:NAMESPACE/NAME"
            )
        if self.port and self.port + self.num_managers - 1 > 65535:
            raise ValueError(
                f"--port {self.port}: {self.num_managers} managers need as many ports; the largest is 65535"
            )
        return self

    @property
    def is_shared(self) -> bool:
        """Whether managers on different nodes have the same epoch and election."""
        return self.state_dir is not None or self.election is not None

    @property
    def shared_folder(self) -> Path | None:
        """Folder in which managers elect by a lock; None: they do not, or not on a disk that nodes share."""
        if self.state_dir is None or self.election not in (None, "file"):
            return None
        return self.state_dir.expanduser().resolve()

    @property
    def num_managers(self) -> int:
        """--managers, or the default that fits the election."""
        return self.managers or (SHARED_MANAGERS if self.is_shared else 1)


FLAGS: Final = WorkerFlags(
    "kvpool ray up",
    RaySettings,
    {
        "--manager": "they find the managers that this command starts",
        "--worker-id": "they are called worker-0, worker-1, …",
        "--host": "they listen on the address of their Ray node",
        "--advertise": "they listen on the address of their Ray node",
        "--device": "give --gpus-per-worker",
        "--dry-run": "`kvpool worker --dry-run` prints the plan",
    },
)
