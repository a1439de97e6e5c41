"""The messages between the doctor and its probes: requests, each with the reply that answers it."""

from dataclasses import dataclass, field
from typing import Any

from ds_finetune.system.info import Gpu, HostInfo
from ds_finetune.system.process_messages import ProcessMessage

JOIN_SECONDS = 30
"""How long a rank waits for the others, which may still be importing torch."""
EXCHANGE_SECONDS = 30
"""How long a rank waits in one exchange of data."""


@dataclass(frozen=True)
class FolderInfo:
    """A folder that a run will use, or the nearest existing folder above it; sizes in bytes."""

    existing: str
    is_writable: bool
    free_bytes: int
    held_bytes: int
    """Bytes of an earlier run in the folder; the next run overwrites them."""


class HostQuery(ProcessMessage, kind="details"):
    """Ask for the facts of the host; the probe keeps the environment variables set for later requests."""

    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables that the probe sets before it answers."""
    first_host: str = ""
    """Name of the first host, to be resolved on the host."""
    port: int = 0
    """Port that has to be free; 0 for none."""
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class HostDetails(HostInfo, ProcessMessage, kind="details-reply"):
    """The facts that the doctor checks; sizes in bytes, limits -1 where there is none."""

    gpu_memory: list[Gpu]
    """GPUs that nvidia-smi lists."""
    memory_bytes: int | None
    open_files: int
    locked_bytes: int
    shm_bytes: int
    has_infiniband: bool
    has_ibverbs: bool
    """Whether the library is there by which NCCL uses InfiniBand."""
    triton_problem: list[str]
    """Why Triton cannot make kernels here, and what to install; empty texts where it can."""
    first_host_addresses: list[str]
    """Addresses that the first host's name resolves to here; empty where it does not resolve."""
    folders: dict[str, FolderInfo]
    files: dict[str, str | None]
    """Hash of names and sizes (and of JSON contents) of each file or folder; None where it does not exist."""


class TimeRequest(ProcessMessage, kind="time"):
    """Report the time of the host's clock."""


class TimeReply(ProcessMessage, kind="time-reply"):
    """Seconds since 1970."""

    seconds: float


class PlaceMarkers(ProcessMessage, kind="place-markers"):
    """Create a marker file named after `token` in each folder, or in the nearest folder above it that exists."""

    folders: list[str]
    token: str


class MarkersPlaced(ProcessMessage, kind="markers-placed"):
    """The markers are placed where the folders are writable; the probe removes them at its end."""


class FindMarkers(ProcessMessage, kind="find-markers"):
    """Report which of the marker files are visible in each folder."""

    folders: list[str]
    tokens: list[str]


class MarkersFound(ProcessMessage, kind="markers-found"):
    """Tokens of the visible marker files, by folder."""

    tokens: dict[str, list[str]]


class FreePortRequest(ProcessMessage, kind="free-port"):
    """Report a port that no process listens on."""


class FreePortReply(ProcessMessage, kind="free-port-reply"):
    """A free port."""

    port: int


class BuildOp(ProcessMessage, kind="build-op"):
    """Build and run one of DeepSpeed's operators (see engine/ops/deepspeed_ops.py)."""

    name: str
    settings: dict[str, Any]


class OpBuilt(ProcessMessage, kind="op-built"):
    """The operator ran; `text` describes it."""

    text: str


class NetworkRank(ProcessMessage, kind="measure-network"):
    """Ask to take part in the measurement of the network as one rank, and say where all ranks meet."""

    rank: int
    world_size: int
    address: str
    port: int
    device: str
    local_rank: int
    leaders: tuple[int, ...]
    """The first rank of each host; links are measured between these."""


class NetworkResult(ProcessMessage, kind="network-measured"):
    """What one rank measured: bandwidths in bytes a second, and what went wrong."""

    links: dict[str, float]
    """Bandwidth from this rank to others, by their rank."""
    all_reduce: float = 0.0
    """Bus bandwidth."""
    all_gather: float = 0.0
    num_bytes: int = 0
    """Size of the collectives."""
    missing: tuple[int, ...] = ()
    """Ranks that did not join."""
    wrong: tuple[int, ...] = ()
    """Ranks whose values arrived wrong."""
    problem: str = ""


class RequestRefused(ProcessMessage, kind="refused"):
    """The request failed with a FinetuneError."""

    message: str
    hint: str


class ChildLost(ProcessMessage, kind="child-lost"):
    """The process of a request ended, or did not reply in time (`code` None)."""

    code: int | None
    stderr: str
    """The end of its standard error."""


ChildRequest = BuildOp | NetworkRank
ChildReply = OpBuilt | NetworkResult | RequestRefused | ChildLost


class RunInChildren(ProcessMessage, kind="run-in-children"):
    """Answer each request in a separate process, all in parallel, because each may crash or hang."""

    requests: list[ChildRequest]
    seconds: float


class ChildReplies(ProcessMessage, kind="child-replies"):
    """The replies in the order of the requests."""

    replies: list[ChildReply]


REPLIES: tuple[type[ProcessMessage], ...] = (
    *(HostDetails, TimeReply, MarkersPlaced, MarkersFound, FreePortReply),
    *(OpBuilt, NetworkResult, ChildReplies),
)
"""What a probe may reply with, besides RequestRefused."""
