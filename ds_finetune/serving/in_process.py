"""Completes prompts and scores texts with an exported folder, by plain transformers or ONNX Runtime in this process."""

from collections.abc import Sequence
from pathlib import Path

from ds_finetune.errors import ExportError


def ask(folder: Path, prompts: Sequence[str], *, max_new_tokens: int = 128) -> list[str]:
    """Greedy answers of the model in `folder` to prompts, which its chat template renders where it has one."""
    import torch

    from ds_finetune.data.chat_template import TemplateLimits
    from ds_finetune.data.tokenizer_files import load_tokenizer
    from ds_finetune.export.load import load_exported

    model = load_exported(folder)
    tokenizer = load_tokenizer(str(folder))
    answers = []
    for prompt in prompts:
        if tokenizer.chat_template:
            with TemplateLimits(str(tokenizer.chat_template)):
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
                )
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        ids = inputs["input_ids"].to(model.device)
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return answers


def classify(folder: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """For each text the probability of each class by its name, or under the name of the only label the number that a
    regression predicts.

    The texts are tokenised as a pipeline of transformers tokenises them. ExportError for a reward model, whose input is
    a dialogue.
    """
    from ds_finetune.export.load import load_scorer
    from ds_finetune.foreign.auto_configs import AutoConfig, AutoTokenizer
    from ds_finetune.model.loss.score_config import REWARD, SETTINGS

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, SETTINGS, {}).get("objective") == REWARD:
        raise ExportError(
            f"`{folder}` holds a reward model, which scores answers to prompts and no single texts",
            hint="score it on pairs of answers with `ds-finetune eval`",
        )
    tokenizer, score = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_scorer(folder)
    names, results = config.id2label, []
    for text in texts:
        logits = score(dict(tokenizer(text, return_tensors="pt")))[0]
        scores = logits if len(logits) == 1 else logits.softmax(-1)
        results.append({str(names[number]): score for number, score in enumerate(scores.tolist())})
    return results
