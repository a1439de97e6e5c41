"""The functions that `launch` calls on each host, by requests and orders (host_program.py)."""

from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from ds_finetune.cluster.host_program import HostProgram, facts, kill_children
from ds_finetune.cluster.launch.agent_order import DONE, FAILED, AgentOrder

if TYPE_CHECKING:
    from ds_finetune.cluster.launch.agent import HostAgent


class _AgentOfHost:
    """The elastic agent of this host, with its ranks."""

    def __init__(self, program: HostProgram) -> None:
        self._program = program
        self._agent: HostAgent | None = None

    def load(self) -> None:
        """Import torch, which takes seconds, so that later all agents start at the same time."""
        import ds_finetune.cluster.launch.agent  # noqa: F401

    def run(self, **order: Any) -> str:  # noqa: ANN401 - the fields of AgentOrder
        """Run ranks until they end for good; returns DONE, FAILED, or why the hosts could not connect."""
        from torch.distributed.elastic.agent.server.api import WorkerState
        from torch.distributed.elastic.rendezvous import RendezvousError

        from ds_finetune.cluster.launch.agent import HostAgent, prepare

        given = AgentOrder(**order)
        prepare(given)
        try:
            # The output of rank 0 goes to the launching program.
            with redirect_stdout(self._program.output):
                self._agent = HostAgent(given, self._program.emit)
                result = self._agent.run()
        except RendezvousError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            kill_children()
        return DONE if result is not None and result.state is WorkerState.SUCCEEDED else FAILED

    def save(self) -> None:
        """Ask the ranks to save a checkpoint and end."""
        if self._agent is not None:
            self._agent.save()

    def lose(self, name: str) -> None:
        """Restart the ranks without the agent of host `name`, which is gone."""
        if self._agent is not None:
            self._agent.lose(name)


if __name__ == "__main__":
    connection = HostProgram()
    ranks = _AgentOfHost(connection)
    orders: dict[str, Callable[..., Any]] = {
        "limit_silence": connection.limit_silence,
        "save": ranks.save,
        "lose": ranks.lose,
    }
    connection.serve({"facts": facts, "load": ranks.load, "run": ranks.run}, orders)
