"""The variable that `ds-finetune launch` sets for its ranks; the watchdog no longer reads it."""

import secrets

VARIABLE = "DS_FINETUNE_SECRET"


def new_secret() -> str:
    """A new random text, as 64 hexadecimal digits."""
    return secrets.token_hex(32)
