"""Types of command-line arguments: a number out of range is wrong usage, before anything is loaded."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, least=1)


def from_two(text: str) -> int:
    """A whole number from 2 on."""
    return _whole(text, least=2)


def port(text: str) -> int:
    """A port, or 0 for any free one."""
    return _whole(text, least=0, most=65_535)


def _whole(text: str, *, least: int, most: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"{number} is not {allowed}")
    return number
