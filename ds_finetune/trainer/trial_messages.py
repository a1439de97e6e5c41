"""Messages between a rank and the process in which it tries a micro-batch."""

from dataclasses import dataclass
from typing import Any

from ds_finetune.system.process_messages import ProcessMessage
from ds_finetune.world import World

DONE, OUT_OF_MEMORY, FAILED, ENDED = "done", "out_of_memory", "failed", "ended"


@dataclass(frozen=True)
class TrialRequest(ProcessMessage, kind="trial"):
    """What is tried: a run file as plain values, whose micro-batch is a number, on the ranks of `world`, which meet at
    its address.
    """

    config: Any
    world: World


@dataclass(frozen=True)
class TrialEnd(ProcessMessage, kind="trial_end"):
    """How a rank's trial ended."""

    outcome: str
    """DONE; OUT_OF_MEMORY; FAILED for another reason; or ENDED, because the trial of another rank had failed."""
    peak_bytes: int = 0
    """The most that the rank took of its device; see `PeakMemory.num_bytes`."""
    step_seconds: float = 0.0
    """Of the last step."""
    error: str = ""
    is_secondary: bool = False
    """Whether the error may only be a consequence of the end of another rank."""
    is_port_in_use: bool = False
    """Whether another program has taken the port at which ranks were to meet."""
