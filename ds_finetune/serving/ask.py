"""Completes prompts with an exported folder, by plain transformers or ONNX Runtime in this process."""

from collections.abc import Sequence
from pathlib import Path


def ask(folder: Path, prompts: Sequence[str], *, max_new_tokens: int = 128) -> list[str]:
    """Greedy answers of the model in `folder` to prompts, which its chat template renders where it has one."""
    import torch

    from ds_finetune.data.template_limits import TemplateLimits
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
