"""The messages between the doctor and its probes: requests, each with the reply that answers it."""

from dataclasses import dataclass
from typing import Any

from ds_finetune.cluster.doctor.host_details import HostDetails, HostQuery
from ds_finetune.cluster.doctor.network import NetworkRank, NetworkResult
from ds_finetune.system.process_messages import ProcessMessage


@dataclass(frozen=True)
class DetailsRequest(ProcessMessage, kind="details"):
    """Gather the facts of the host; the probe keeps the query's environment variables set for later requests."""

    query: HostQuery


@dataclass(frozen=True)
class DetailsReply(ProcessMessage, kind="details-reply"):
    """The facts of the host."""

    details: HostDetails


@dataclass(frozen=True)
class TimeRequest(ProcessMessage, kind="time"):
    """Report the time of the host's clock."""


@dataclass(frozen=True)
class TimeReply(ProcessMessage, kind="time-reply"):
    """Seconds since 1970."""

    seconds: float


@dataclass(frozen=True)
class PlaceMarkers(ProcessMessage, kind="place-markers"):
    """Create a marker file named after `token` in each folder, or in the nearest folder above it that exists."""

    folders: list[str]
    token: str


@dataclass(frozen=True)
class MarkersPlaced(ProcessMessage, kind="markers-placed"):
    """The markers are placed where the folders are writable; the probe removes them at its end."""


@dataclass(frozen=True)
class FindMarkers(ProcessMessage, kind="find-markers"):
    """Report which of the marker files are visible in each folder."""

    folders: list[str]
    tokens: list[str]


@dataclass(frozen=True)
class MarkersFound(ProcessMessage, kind="markers-found"):
    """Tokens of the visible marker files, by folder."""

    tokens: dict[str, list[str]]


@dataclass(frozen=True)
class FreePortRequest(ProcessMessage, kind="free-port"):
    """Report a port that no process listens on."""


@dataclass(frozen=True)
class FreePortReply(ProcessMessage, kind="free-port-reply"):
    """A free port."""

    port: int


@dataclass(frozen=True)
class BuildOp(ProcessMessage, kind="build-op"):
    """Build and run one of DeepSpeed's operators (see engine/ops/deepspeed_ops.py)."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class OpBuilt(ProcessMessage, kind="op-built"):
    """The operator ran; `text` describes it."""

    text: str


@dataclass(frozen=True)
class MeasureNetwork(ProcessMessage, kind="measure-network"):
    """Take part in the measurement of the network as one rank."""

    place: NetworkRank


@dataclass(frozen=True)
class NetworkMeasured(ProcessMessage, kind="network-measured"):
    """What the rank measured."""

    result: NetworkResult


@dataclass(frozen=True)
class RequestRefused(ProcessMessage, kind="refused"):
    """The request failed with a FinetuneError."""

    message: str
    hint: str


@dataclass(frozen=True)
class ChildLost(ProcessMessage, kind="child-lost"):
    """The process of a request ended, or did not reply in time (`code` None)."""

    code: int | None
    stderr: str
    """The end of its standard error."""


ChildRequest = BuildOp | MeasureNetwork
ChildReply = OpBuilt | NetworkMeasured | RequestRefused | ChildLost


@dataclass(frozen=True)
class RunInChildren(ProcessMessage, kind="run-in-children"):
    """Answer each request in a separate process, all in parallel, because each may crash or hang."""

    requests: list[ChildRequest]
    seconds: float


@dataclass(frozen=True)
class ChildReplies(ProcessMessage, kind="child-replies"):
    """The replies in the order of the requests."""

    replies: list[ChildReply]


REPLIES: tuple[type[ProcessMessage], ...] = (
    DetailsReply,
    TimeReply,
    MarkersPlaced,
    MarkersFound,
    FreePortReply,
    OpBuilt,
    NetworkMeasured,
    ChildReplies,
)
"""What a probe may reply with, besides RequestRefused."""
