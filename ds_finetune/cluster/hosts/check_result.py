"""The result of one check of one host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ds_finetune.config.hostfile import Host

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One check of one host: its name, the host (empty for all hosts together), the state, what was found, a hint."""

    name: str
    host: str
    state: State
    found: str
    hint: str = ""
    values: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Measured numbers for programs, with their units in their names."""


def label(host: Host) -> str:
    """The name of a host in reports: the host name of its hostfile line, with the port where the line has one."""
    return f"{host.name}:{host.port}" if host.port else host.name
