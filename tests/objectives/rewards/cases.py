"""Rewards of a file as a user might write them, most of them wrong."""

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

KEPT: list[Any] = []


def right(record: dict[str, Any], text: str) -> float:
    return float(text == record["answer"])


def everything(record: dict[str, Any], prompt: str, text: str, token_ids: list[int], finish_reason: str) -> float:
    assert (record, prompt, text, finish_reason) == ({"answer": "4"}, "2+2=", "4", "stop")
    return float(sum(token_ids))


def any_arguments(**given: Any) -> int:
    return len(given)


async def waits(text: str) -> bool:
    await asyncio.sleep(0)
    return text == "4"


def only_numbers(text: str) -> float | None:
    return 1.0 if text.isdigit() else None


def not_a_number(text: str) -> float:
    return float("nan")


def infinite(text: str) -> float:
    return float("inf")


def too_large(text: str) -> int:
    return 10**400


def of_numpy(text: str) -> Any:
    import numpy as np

    return {"4": np.bool_(True), "5": np.array(0.5), "6": np.float32(0.25), "7": np.int64(3)}[text]


def raises_what_has_no_text(text: str) -> float:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise SilentError


def a_text(text: str) -> Any:
    return "good"


def a_list(text: str) -> Any:
    return [1.0, 0.0]


def raises(text: str) -> float:
    return 1 / (len(text) - len(text))


def leaves(text: str) -> float:
    sys.exit(0)


def loops(text: str) -> float:
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001 - as users write it
            continue


async def sleeps(text: str) -> float:
    await asyncio.sleep(1e6)
    return 1.0


def hangs_in_c(text: str) -> float:
    """The alarm of Python does not end this: it arrives after the call, which begins again after signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(10_000)
    return 1.0


def names_itself_and_hangs(record: dict[str, Any], text: str) -> float:
    Path(record["file"]).write_text(str(os.getpid()))
    return hangs_in_c(text)


def counts_calls(record: dict[str, Any]) -> int:
    with Path(record["file"]).open("a") as file:
        file.write("x")
    return Path(record["file"]).stat().st_size


def ends_process(text: str) -> float:
    os._exit(7)


def is_killed(text: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def is_killed_once(record: dict[str, Any], text: str) -> float:
    """The first process that comes here is killed."""
    try:
        os.close(os.open(record["file"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 0.5
    return is_killed(text)


def is_asked_to_end(text: str) -> float:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return float(text)


def forks(text: str) -> float:
    """Both processes return."""
    pid = os.fork()
    return 0.25 if pid else 0.75


def leaves_a_process(record: dict[str, Any], text: str) -> float:
    """The forked process holds every pipe that this one has."""
    pid = os.fork()
    if not pid:
        signal.pause()
    Path(record["file"]).write_text(str(pid))
    os._exit(1)


def prints(text: str) -> float:
    print('{"parts": []}\n' * 100, flush=True)  # noqa: T201
    os.write(1, b"written by the reward\n")
    print("an error line", file=sys.stderr)  # noqa: T201
    return 1.0


def prints_and_raises(record: dict[str, Any]) -> float:
    print("from the reward")  # noqa: T201
    return float(record["no such column"])


def writes_into_connections(record: dict[str, Any], text: str) -> float:
    """Writes what a reply might be into every socket, before or after which its own follows."""
    for descriptor in range(3, 64):
        if text == "stray" and Path(f"/proc/self/fd/{descriptor}").is_socket():
            os.write(descriptor, record["line"].encode())
    return float(text == "4")


def takes_memory(text: str) -> float:
    KEPT.append(bytearray(2**40))
    return 1.0


def changes_its_record(record: dict[str, Any]) -> float:
    return float(record.pop("answer") == "4")


def of_trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 for _ in completions]


def a_wrong_constant(text: str) -> float:
    return -1.0


def not_applicable(text: str) -> None:
    return None


NO_FUNCTION = 3
