"""`ds-finetune eval` beside a loop that does one document at a time with transformers' own template, loss and generate."""

import copy
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ds_finetune import api
from ds_finetune.cli.main import main
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.evaluation.model_scores import Document, generate_answers, length_batches
from tests.running import tiny_task

ROWS, NEW_TOKENS = 11, 5


def _model(folder: Path, out: str, seed: int) -> PreTrainedModel:
    from transformers import AutoConfig

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).float().eval()
    # Large enough to prefer some tokens clearly, so that padding's roundings choose no other.
    model.get_output_embeddings().weight.data.mul_(8.0)
    shutil.copytree(folder / "model", folder / out)
    model.save_pretrained(folder / out)
    return model


def _answer(model: PreTrainedModel, tokenizer: Any, prompt: str) -> str:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)  # type: ignore[operator]
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, PreTrainedModel]]:
    """Two random models and rows whose answers are the first one's own in four of eleven cases; prompts and answers of
    many lengths.
    """
    folder = tmp_path_factory.mktemp("eval")
    tiny_task(folder)
    models = {name: _model(folder, name, seed) for name, seed in (("tuned", 1), ("base", 2))}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = []
    for number in range(ROWS):
        prompt = "what is " + "x" * (7 * number % 13) + f"{number}?"
        own = _answer(models["tuned"], tokenizer, prompt)
        assert own.strip()
        rows.append({"question": prompt, "answer": own if number < 4 else "no, " + "y" * number})
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, models


def _reference(model: PreTrainedModel, folder: Path) -> tuple[float, float, float]:
    """Mean loss, token accuracy and share of right answers, one row at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total = right = count = exact = 0.0
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    for row in rows:
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        prompt, whole = (
            tokenizer(
                tokenizer.apply_chat_template(t, add_generation_prompt=opens, tokenize=False), add_special_tokens=False
            )["input_ids"]
            for t, opens in ((turns[:1], True), (turns, False))
        )
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.tensor(whole[len(prompt) :])
        total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        right += (logits.argmax(-1) == wanted).sum().item()
        count += len(wanted)
        exact += " ".join(_answer(model, tokenizer, row["question"]).split()) == " ".join(row["answer"].split())
    return total / count, right / count, exact / len(rows)


COLUMNS = ["--column", "prompt=question", "--column", "completion=answer"]


def test_both_models_are_scored_as_one_row_at_a_time_scores_them(
    task: tuple[Path, dict[str, PreTrainedModel]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, models = task
    arguments = [
        "--data",
        str(folder / "test.jsonl"),
        *COLUMNS,
        "--extract",
        "text",
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--batch-tokens",
        "100",
    ]
    given = [
        "eval",
        str(folder / "tuned"),
        "--baseline",
        str(folder / "base"),
        *arguments,
        "--json",
        str(folder / "found.json"),
    ]
    assert main(given) == 0
    found = json.loads((folder / "found.json").read_text())["data"]
    assert (found["documents"], found["method"][:6]) == (ROWS, "paired")
    for side, name in (("value", "tuned"), ("baseline", "base")):
        loss, accuracy, exact = _reference(models[name], folder)
        assert found["metrics"]["loss"][side] == pytest.approx(loss, rel=1e-5)
        assert found["metrics"]["token_accuracy"][side] == pytest.approx(accuracy)
        assert found["metrics"]["exact_match"][side] == pytest.approx(exact)
    exact = found["metrics"]["exact_match"]
    assert (exact["value"], exact["baseline"]) == (pytest.approx(4 / ROWS), 0.0)
    low, high = exact["interval"]
    assert low < exact["difference"] < high
    printed = capsys.readouterr().out
    assert "11 rows read, 0 truncated to 512 tokens" in printed
    assert f"{exact['value']:.4f}" in printed
    assert "seed 0" in " ".join(printed.split())


def test_pass_at_k_of_sampled_answers(task: tuple[Path, dict[str, PreTrainedModel]]) -> None:
    """Answers of one token, whose probabilities are known; two models of which one is nearly always right."""
    folder, models = task
    tokenizer, samples = AutoTokenizer.from_pretrained(folder / "model"), 256
    rows, expected = [], []
    for number in range(4):
        prompt = "what is " + "x" * number
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        with torch.no_grad():
            logits = models["tuned"](tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]).logits
        texts = [tokenizer.decode([token], skip_special_tokens=True).strip() for token in range(logits.shape[-1])]
        answer = next(
            texts[token] for token in logits[0, -1].argsort(descending=True)[number:].tolist() if texts[token]
        )
        rows.append({"question": prompt, "answer": answer})
        is_right = torch.tensor([each == answer for each in texts])
        expected.append(float(logits[0, -1].softmax(-1)[is_right].sum()))
    (folder / "sampled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = api.evaluate(
        folder / "tuned",
        folder / "sampled.jsonl",
        columns={"prompt": "question", "completion": "answer"},
        extract="text",
        samples=samples,
        max_new_tokens=1,
        batch_tokens=10_000,
    )
    shares = torch.tensor(expected)
    sigma = float((shares * (1 - shares)).sum().sqrt()) / samples**0.5 / len(rows)
    found = {name: metric.value for name, metric in report.metrics.items() if "pass_at" in name}
    assert [*found][:3] == ["sampled_pass_at_1", "pass_at_2", "pass_at_4"]
    assert [*found][-1] == "pass_at_256"
    assert found["sampled_pass_at_1"] == pytest.approx(float(shares.mean()), abs=4 * sigma)
    assert found["pass_at_4"] == pytest.approx(float((1 - (1 - shares) ** 4).mean()), abs=8 * sigma)
    assert 0 < sigma < 0.02


def test_sampled_answers_are_those_to_their_prompts(task: tuple[Path, dict[str, PreTrainedModel]]) -> None:
    """A model that is certain of each token draws what it finds best, which differs by prompt."""
    model = copy.deepcopy(task[1]["tuned"])
    model.get_output_embeddings().weight.data.mul_(1e4)
    prompts = [[3 + number] * (1 + number % 4) for number in range(9)]
    documents = [Document([*prompt, 3], [False] * len(prompt) + [True], prompt, [3]) for prompt in prompts]
    limits = SamplingLimits(NEW_TOKENS, (1,))
    greedy = generate_answers(model, documents, limits, batch_tokens=30)
    assert len({tuple(answer) for (answer,) in greedy}) > 4
    sampled = generate_answers(model, documents, limits, batch_tokens=100, samples=3)
    assert sampled == [answers * 3 for answers in greedy]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--samples", "4"], "samples is 4, and extract is not given"),
        (["--extract", "gsm8k"], "`--extract gsm8k` finds no answer in 11 of 11 rows, the first number 0"),
        (["--column", "x"], "--column has `x` instead of NAME=COLUMN"),
        (["--baseline", "{folder}/none"], "is not a folder"),
        (["--baseline", "{folder}/small"], "token ids up to"),
        (["--baseline", "{folder}/other"], "tokens that the rows use"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    task: tuple[Path, dict[str, PreTrainedModel]],
    arguments: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = task
    for name in ("small", "other"):
        shutil.copytree(folder / "base", tmp_path / name)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    swapped = (
        (tmp_path / "other" / "tokenizer.json")
        .read_text()
        .replace('"x":', '"\\u0001":')
        .replace('"w":', '"x":')
        .replace('"\\u0001":', '"w":')
    )
    (tmp_path / "other" / "tokenizer.json").write_text(swapped)
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(["eval", str(folder / "tuned"), "--data", str(folder / "test.jsonl"), *COLUMNS, *given]) == 2
    assert text in capsys.readouterr().err


def test_rows_that_are_too_long_are_cut_or_left_out(
    task: tuple[Path, dict[str, PreTrainedModel]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = task
    given = ["eval", str(folder / "tuned"), "--data", str(folder / "test.jsonl"), *COLUMNS, "--max-seq-len", "37"]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "11 rows read, 1 truncated to 37 tokens (0." in printed
    assert "% of all tokens cut off), 0 split, 0 too long, 0 without supervised tokens, 11 documents scored" in printed
    assert main([*given, "--long-rows", "drop"]) == 0
    assert (
        "(0.00% of all tokens cut off), 0 split, 1 too long, 0 without supervised tokens, 10 documents scored"
        in capsys.readouterr().out
    )


def test_named_sets_have_metrics_of_their_own(
    task: tuple[Path, dict[str, PreTrainedModel]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of all documents together are those of the same files without names."""
    folder, _ = task
    lines = (folder / "test.jsonl").read_text().splitlines(keepends=True)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("old", "new")}
    files["old"].write_text("".join(lines[:4]))
    files["new"].write_text("".join(lines[4:]))

    def scored(*data: str) -> dict[str, Any]:
        out = tmp_path / "scores.json"
        models = [str(folder / "tuned"), "--baseline", str(folder / "base")]
        assert main(["eval", *models, "--data", *data, *COLUMNS, "--json", str(out)]) == 0
        return dict(json.loads(out.read_text())["data"])

    named = scored(*(f"{name}={file}" for name, file in files.items()))
    assert "new/loss" in capsys.readouterr().out
    assert named["metrics"] == scored(*map(str, files.values()))["metrics"]
    for name, file in files.items():
        assert named["sets"][name] == scored(str(file))["metrics"]
    for data, text in ((["a b=x.jsonl"], "the name `a b`"), (["x.jsonl", "a=y.jsonl"], "but `x.jsonl` has none")):
        assert main(["eval", str(folder / "tuned"), "--data", *data]) == 2
        assert text in capsys.readouterr().err


def test_eval_without_data_or_without_lm_eval_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "has nothing to score on" in capsys.readouterr().err
    if find_spec("lm_eval") is None:
        assert main(["eval", str(tmp_path), "--tasks", "gsm8k,arc_easy"]) == 2
        assert "--tasks gsm8k,arc_easy needs lm-evaluation-harness" in capsys.readouterr().err


def test_batches_have_similar_lengths_and_each_sequence_once() -> None:
    lengths = [3, 50, 7, 8, 200, 1]
    found = list(length_batches(lengths, 60))
    assert found == [[4], [1], [3, 2, 0, 5]]
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 60 for batch in found)
