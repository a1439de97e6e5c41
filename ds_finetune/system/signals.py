"""Signals that ask a run to end, of which a process may receive the same one several times."""

import signal


def echo_seconds(number: int) -> float:
    """Within how many seconds after a signal another one with this `number` is the same request.

    A scheduler signals every process of a job, a closing terminal sends two signals, and launchers and wrapper programs
    forward those that the processes have received themselves. Wrappers of a command in a terminal, as `uv run`, forward
    SIGINT at once, and whoever presses Ctrl-C again means it.
    """
    return 0.5 if number == signal.SIGINT else 2.0
