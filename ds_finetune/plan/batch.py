"""The batch triple: rows of a step = rows of a forward x accumulation x data-parallel ranks."""

from ds_finetune.errors import ConfigError


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Forwards per optimizer step on one rank; ConfigError names the nearest legal global batch sizes."""
    rows_per_pass = micro_batch_size * dp
    whole, rest = divmod(global_batch_size, rows_per_pass)
    if rest:
        legal = [n * rows_per_pass for n in (whole, whole + 1) if n]
        raise ConfigError(
            f"train.global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} "
            f"x dp {dp} = {rows_per_pass}",
            hint=f"nearest: {' or '.join(map(str, legal))}{_divisors_hint(global_batch_size, dp)}"
            + _worlds_hint(global_batch_size, micro_batch_size),
        )
    return whole


def _worlds_hint(global_batch_size: int, micro_batch_size: int) -> str:
    """Ranks that can share the global batch in forwards of this size."""
    forwards, rest = divmod(global_batch_size, micro_batch_size)
    legal = [str(dp) for dp in range(1, forwards + 1) if forwards % dp == 0] if not rest else []
    return f"; or start {', '.join(legal)} ranks" if legal else ""


def _divisors_hint(global_batch_size: int, dp: int) -> str:
    if global_batch_size % dp:
        return ""
    rows = global_batch_size // dp
    legal = [str(n) for n in range(1, rows + 1) if rows % n == 0]
    return f"; or train.micro_batch_size {', '.join(legal[:8])}"
