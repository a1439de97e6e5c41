"""Compares forwards with a cache with forwards without one, for model types without a row in the table of families."""

from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from ds_finetune.engine.sampling.answer_model import AnswerModel
from ds_finetune.engine.sampling.row_cache import RowCache
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of

_KEPT = {"full_attention", "sliding_attention"}
"""Kinds of layers whose state is keys and values of tokens."""
_TEXTS = (6, 9)
"""Tokens of the texts, which are read whole and token by token."""
_READ = 4
"""Tokens that are read one by one."""
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Difference of logits, relative to the largest, from which a cache counts as wrong."""
_HINT = "sample with a model type of docs/reference/model-types.md, or train with another objective than grpo"
_checked: WeakSet[PreTrainedModel] = WeakSet()


def check_cache(model: AnswerModel, lm: PreTrainedModel) -> None:
    """ModelError where answers of `lm` cannot be sampled with keys and values of earlier tokens. Once for a model;
    collective where forwards are.
    """
    config = lm.config
    if not family_of(config.model_type).is_generic or lm in _checked:
        return
    others = set(getattr(config, "layer_types", None) or ()) - _KEPT
    if others or getattr(lm, "_is_stateful", False):
        kinds = ", ".join(sorted(others)) or "a state of its own"
        raise ModelError(f"answers of model_type `{config.model_type}` cannot be sampled: it has {kinds}", hint=_HINT)
    difference = max(map(float, _differences(model, config.vocab_size)))
    if not difference < _LIMITS[next(lm.parameters()).dtype]:
        raise ModelError(
            f"answers of model_type `{config.model_type}` cannot be sampled: with a cache its logits differ by "
            f"{difference:.1e} of the largest from those without one",
            hint=_HINT,
        )
    _checked.add(lm)


def _differences(model: AnswerModel, vocabulary: int) -> torch.Tensor:
    """The difference of the logits after each text, read whole, and token by token beside the other one."""
    lengths = _TEXTS if model.takes_mixed_lengths else _TEXTS[:1] * 2
    texts = [[token * 7 % vocabulary for token in range(3, 3 + length)] for length in lengths]
    whole = torch.cat([model.read_prompts([text])[1] for text in texts])
    prompts, _ = model.read_prompts([text[:-_READ] for text in texts])
    columns, begins = max(lengths) - _READ, torch.tensor(lengths, device=model.device) - _READ
    rows = [(prompt, slice(row, row + 1)) for row, prompt in enumerate(prompts)]
    cache = RowCache(rows, rows=len(texts), columns=columns, longest=max(lengths))
    is_key = torch.arange(max(lengths), device=model.device) >= (columns - begins)[:, None, None, None]
    for step in range(_READ):
        ids = torch.tensor([text[step - _READ] for text in texts], device=model.device)
        seen = is_key[..., : columns + step + 1] if model.takes_mixed_lengths else None
        logits = model.read_tokens(ids, begins + step, cache, seen)
    return (logits - whole).abs().amax(dim=1) / whole.abs().max()
