"""Into how many tiles an MLP divides the tokens of a forward."""

import math
from collections.abc import Mapping
from typing import Any

from ds_finetune.families.table import family_of


def mlp_tiles(model: Mapping[str, Any]) -> int:
    """Into how many tiles the tokens of a forward are divided, from the config.json of a model.

    So many that what one tile keeps within its MLP is no more than one hidden state of every token. The number does not
    depend on the tokens, so that all ranks have as many.
    """
    dense = 4 * model["intermediate_size"]
    keys = family_of(str(model["model_type"])).expert_keys
    experts = keys.per_token(model) * (2 * model["hidden_size"] + 4 * keys.width(model)) if keys else 0
    return max(1, math.ceil(max(dense, experts) / model["hidden_size"]))
