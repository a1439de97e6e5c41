"""The program that `launch` starts on each host, and whose functions `facts`, `load` and `run` it calls."""

from typing import Any

from ds_finetune.cluster.host_program import HostProgram, facts


def load() -> None:
    """Import torch before the elastic agent of this host starts. The import takes seconds, and the agents of all hosts
    should start together.
    """
    import ds_finetune.cluster.launch.agent  # noqa: F401


def run(**arguments: Any) -> bool | str:  # noqa: ANN401 - arguments of run_ranks
    """Run the ranks of this host under torch's elastic agent."""
    from ds_finetune.cluster.launch.agent import run_ranks

    return run_ranks(connection, **arguments)


if __name__ == "__main__":
    connection = HostProgram()
    connection.serve({"facts": facts, "load": load, "run": run})
