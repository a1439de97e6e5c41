"""The section `launch` of the run file."""

from pydantic import Field

from ds_finetune.config.section import Section


class LaunchConfig(Section):
    """How `ds-finetune launch` supervises a run on its hosts; other launchers do not read it."""

    restarts: int = Field(default=0, ge=0)
    """Starts from the newest checkpoint after a rank or a host has failed, before the run is given up."""
    min_hosts: int | None = Field(default=None, ge=1)
    """Fewest hosts to resume with; left out, all of the hostfile. The global batch stays what it is."""
    wait_seconds: float = Field(default=600, ge=0)
    """How long a restart waits for hosts to come back where there are too few."""
    greeting_seconds: float = Field(default=30, gt=0)
    """How long a host has for its first message, with the start of ssh and Python; ssh tries to connect for two
    seconds less.
    """
    silent_seconds: float = Field(default=10, ge=3)
    """Seconds without a message after which a host is given up, and after which a host that hears nothing ends its
    ranks.
    """
