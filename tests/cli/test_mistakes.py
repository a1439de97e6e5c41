"""Mistakes of users in run files, overrides, rows, flags and calls: each is one error that names it, before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds_finetune
from ds_finetune.cli.demo import write_demo
from ds_finetune.cli.main import main
from ds_finetune.errors import FinetuneError

OVERRIDES: tuple[tuple[str, str], ...] = (
    ("optim.lr=0", "`optim.lr` is 0"),
    ("optim.lr=nan", "`optim.lr` is 'nan'"),
    ("optim.lr=inf", "`optim.lr` is 'inf'"),
    ("optim.lr=", "`optim.lr` is None"),
    ("optim.lr=1e", "`optim.lr` is '1e'"),
    ("data.eval=3,5%", "`3,5%` is no share of data.train; write `3.5%`"),
    ("optim.lr", "override `optim.lr` is not of the form section.key=value"),
    ("optim.learning_rate=1", "unknown key `optim.learning_rate`"),
    ("optim.betas=[0.9]", "`optim.betas` is [0.9]"),
    ("optim.betas=[0.9,1.0]", "`optim.betas` is 1.0"),
    ("optim.betas=0.9", "`optim.betas` is 0.9"),
    ("optim.eps=-1", "`optim.eps` is -1"),
    ("optim.weight_decay=-0.1", "`optim.weight_decay` is -0.1"),
    ("optim.lr_scheduler=cosin", "`optim.lr_scheduler` is 'cosin'"),
    ("optim.lr_scheduler=polynomial", "`optim.lr_scheduler` is 'polynomial'"),
    ("optim.warmup=0.03", "`optim.warmup` is 0.03"),
    ("optim.warmup=200%", "`optim.warmup` is '200%'"),
    ("optim.warmup=-5 steps", "`optim.warmup` is '-5 steps'"),
    ("optim.warmup=ten steps", "`optim.warmup` is 'ten steps'"),
    ("optim.min_lr_ratio=2", "`optim.min_lr_ratio` is 2"),
    ("optim.name=adamm", "optim.name `adamm` is not known"),
    ("optim=fast", "`optim` is 'fast'"),
    ("train.for=10", "`train.for` is 10"),
    ("train.for=0 steps", "`train.for` is '0 steps'"),
    ("train.for=-3 epochs", "`train.for` is '-3 epochs'"),
    ("train.for=three epochs", "`train.for` is 'three epochs'"),
    ("train.for=1.5 steps", "`train.for` is '1.5 steps'"),
    ("train.epochs=3", "unknown key `train.epochs`"),
    ("train.global_batch_size=0", "`train.global_batch_size` is 0"),
    ("train.global_batch_size=7", "train.global_batch_size 7 is not a multiple of micro_batch_size"),
    ("train.global_batch_size=8.5", "`train.global_batch_size` is 8.5"),
    ("train.micro_batch_size=3", "train.global_batch_size 8 is not a multiple of micro_batch_size"),
    ("train.micro_batch_size=16", "train.global_batch_size 8 is not a multiple of micro_batch_size"),
    ("train.micro_batch_size=atuo", "`train.micro_batch_size` is 'atuo'"),
    ("train.micro_batch_size=0", "`train.micro_batch_size` is 0"),
    ("train.max_seq_len=0", "`train.max_seq_len` is 0"),
    ("train.max_seq_len=-1", "`train.max_seq_len` is -1"),
    ("train.max_seq_len=4096", "train.max_seq_len 4096 is more than the 512 positions"),
    ("train.max_seq_len=2k", "`train.max_seq_len` is '2k'"),
    ("train.precision=bf-16", "`train.precision` is 'bf-16'"),
    ("train.precision=int8", "`train.precision` is 'int8'"),
    ("train.precision=16", "`train.precision` is 16"),
    ("train.seed=-1", "`train.seed` is -1"),
    ("train.seed=1.5", "`train.seed` is 1.5"),
    ("train.max_grad_norm=-1", "`train.max_grad_norm` is -1"),
    ("train.activation_checkpointing=maybe", "`train.activation_checkpointing` is 'maybe'"),
    ("train.activation_checkpointing=true", "is True: it should be 'auto', 'full', 'selective' or 'none'"),
    ("train.max_skipped_steps=-1", "`train.max_skipped_steps` is -1"),
    ("train.reduction_dtype=fp8", "`train.reduction_dtype` is 'fp8'"),
    ("train=fast", "`train` is 'fast'"),
    ("parallel.tp=0", "`parallel.tp` is 0"),
    ("parallel.tp=3", "1 ranks are not a multiple of parallel tp 3 = 3"),
    ("parallel.tp=2", "1 ranks are not a multiple of parallel tp 2 = 2"),
    ("parallel.pp=5", "1 ranks are not a multiple of parallel pp 5 = 5"),
    ("parallel.ep=3", "parallel.ep 3 does not divide the 1 ranks of dp 1 x sp 1"),
    ("parallel.sp=3", "1 ranks are not a multiple of parallel sp 3 = 3"),
    ("parallel.vpp=2", "parallel.vpp 2 with parallel.pp 1"),
    ("parallel.pp_layers=[1,1]", "parallel.pp_layers [1, 1] with parallel.pp 1"),
    ("parallel.dp=2", "unknown key `parallel.dp`"),
    ("model.path=/no/such/folder", "model `/no/such/folder` is not a folder"),
    ("model.path=", "`model.path` is None"),
    ("model.path=gpt2", "model `gpt2` is not a folder"),
    ("model.weights=randm", "`model.weights` is 'randm'"),
    ("model.attention=flash", "`model.attention` is 'flash'"),
    ("model.context=0", "`model.context` is 0"),
    ("model.context=16", "train.max_seq_len 512 is more than model.context 16"),
    ("model.loss=fused", "`model.loss` is 'fused'"),
    ("model.pth=x", "unknown key `model.pth`"),
    ("data.train=", "`data.train` is None"),
    ("data.layout=chat", "`data.layout` is 'chat'"),
    ("data.columns=prompt", "`data.columns` is 'prompt'"),
    ("data.train_on=user", "`data.train_on` is 'user'"),
    ("data.reasoning=drop", "`data.reasoning` is 'drop'"),
    ("data.long_rows=cut", "`data.long_rows` is 'cut'"),
    ("data.max_dropped_ratio=2", "`data.max_dropped_ratio` is 2"),
    ("data.workers=-1", "`data.workers` is -1"),
    ("data.streaming=maybe", "`data.streaming` is 'maybe'"),
    ("data.packing=2", "`data.packing` is 2"),
    ("data.separator=5", "`data.separator` is 5"),
    ("data.bad_rows=ignore", "`data.bad_rows` is 'ignore'"),
    ("objective=grpo", "`eval.generate.prompts` is 40 and has no effect: the rewards"),
    ("objective=ppo", "`objective` is 'ppo'"),
    ("objective=DPO", "`objective` is 'DPO'"),
    ("objective=classification", "`eval.generate.max_new_tokens` is 24 and has no effect"),
    ("objective=reward", "`eval.generate.max_new_tokens` is 24 and has no effect"),
    ("objective={name: dpo, beta: -1}", "`objective.beta` is -1"),
    ("objective={name: dpo, bta: 1}", "unknown key `objective.bta`"),
    ("objective={name: dpo, loss: log}", "`objective.loss` is 'log'"),
    ("objective={name: distill}", "objective distill has objective.teacher None"),
    ("objective={name: distill, teacher: /no/such}", "model `/no/such` is not a folder"),
    ("objective={beta: 1}", "`objective` is {'beta': 1}: it should be a name or a section with a name"),
    ("objective={name: classification, num_labels: 1}", "`eval.generate.max_new_tokens` is 24 and has no effect"),
    ("lora.rank=0", "`lora.rank` is 0"),
    ("lora.rank=-8", "`lora.rank` is -8"),
    ("lora={}", "lora with model.weights random is not tested"),
    ("lora={rank: 8, alpha: 0}", "`lora.alpha` is 0"),
    ("lora={rank: 8, target_modules: [nothing_like_this]}", "lora with model.weights random is not tested"),
    ("lora={rank: 8, target_modules: []}", "`lora.target_modules` is []"),
    ("lora={rank: 8, target_modules: q_proj}", "lora with model.weights random is not tested"),
    ("lora={rank: 8, quantize: int4}", "`lora.quantize` is 'int4'"),
    ("lora={r: 8}", "unknown key `lora.r`"),
    ("lora=true", "lora with model.weights random is not tested"),
    ("eval.every=often", "`eval.every` is 'often'"),
    ("eval.every=0 steps", "`eval.every` is '0 steps'"),
    ("eval.limit=-1", "`eval.limit` is -1"),
    ("eval.generate={prompts: -1}", "`eval.generate.prompts` is -1"),
    ("eval.patience=-1", "`eval.patience` is -1"),
    ("checkpoint.every=0 steps", "`checkpoint.every` is '0 steps'"),
    ("checkpoint.every=often", "`checkpoint.every` is 'often'"),
    ("checkpoint.keep=-1", "`checkpoint.keep` is -1"),
    ("checkpoint.keep=0", "`checkpoint.keep` is 0"),
    ("checkpoint.resume=yes", "`checkpoint.resume` is True"),
    ("deepspeed=/no/such.json", "deepspeed file `/no/such.json` does not exist"),
    ('deepspeed="a\\0b"', "no file or folder can have this name"),
    ("deepspeed={zero_optimization: {stage: 4}}", "`deepspeed` in the run file: zero_optimization.stage is 4"),
    ("deepspeed={zero_optimisation: {stage: 1}}", "unknown key `zero_optimisation`"),
    ("deepspeed={fp16: {enabled: true}}", "`deepspeed` in the run file: fp16.enabled True contradicts"),
    ("deepspeed={zero_optimization: 3}", "`deepspeed` in the run file: `zero_optimization` is 3"),
    ("deepspeed={optimizer: {type: Adam}}", "`deepspeed` in the run file: optimizer.type 'Adam' contradicts"),
    ("inexact=[everything]", "`inexact` is 'everything'"),
    ("inexact=quantized_weights", "inexact names quantized_weights, which has no effect"),
    ("log.every=0", "`log.every` is 0"),
    ("log.trackers=5", "`log.trackers` is 5"),
    ("mtp.weight=-1", "`mtp.weight` is -1"),
    ("router.balance=-1", "`router.balance` is -1"),
    ("router={train: perhaps}", "`router.train` is 'perhaps'"),
    ("indexer.train=true", "indexer.train true with model_type deepseek_v3"),
    ("profile={steps: 10-5}", "`profile.steps` is '10-5'"),
    ("profile={steps: 1-3, ranks: [9]}", "profile.ranks names 9"),
    ("launch.restarts=-1", "`launch.restarts` is -1"),
    ("launch.min_hosts=0", "`launch.min_hosts` is 0"),
    ("watchdog.limit=ten minutes", "`watchdog.limit` is 'ten minutes'"),
    ("watchdog.limit=0 s", "`watchdog.limit` is '0 s'"),
    ("watchdog.straggler_ratio=0.5", "`watchdog.straggler_ratio` is 0.5"),
    ("export.max_shard_size=5", "`export.max_shard_size` is 5"),
    ("export.max_shard_size=huge", "export.max_shard_size `huge` is not a size with a unit"),
    ("export.format=gguf", "unknown key `export.format`"),
    ("output_dir=", "`output_dir` is None"),
    ("foo=1", "unknown key `foo`"),
    ("foo.bar=1", "unknown key `foo`"),
    (".lr=1", "override `.lr=1` is not of the form section.key=value"),
    ("=1", "override `=1` is not of the form section.key=value"),
    ("train..seed=1", "override `train..seed=1` is not of the form section.key=value"),
    ("TRAIN.seed=1", "unknown key `TRAIN`"),
)
"""Overrides of the example's run file, and a part of the error of `plan`."""
FLAGS: tuple[tuple[str, str], ...] = (
    ("", "COMMAND"),
    ("trian RUN", "invalid choice: 'trian'"),
    ("train", "RUN.yaml"),
    ("train RUN --resume", "--resume"),
    ("train RUN optim.lr=1e-4 optim.lr=2e-4", "`optim.lr` is given twice: optim.lr=1e-4 and optim.lr=2e-4"),
    ("train /no.yaml", "run file `/no.yaml` does not exist"),
    ("train DIR", "cannot be read: Is a directory"),
    ("plan", "RUN.yaml"),
    ("plan RUN --gpu H1000", "GPU `H1000` is not in the table"),
    ("plan RUN --nodes -1", "argument --nodes"),
    ("launch RUN", "neither --hostfile nor --nproc"),
    ("launch RUN --nproc 0", "--nproc is 0"),
    ("launch RUN --nproc 0", "--nproc is 0"),
    ("launch RUN --hostfile /no", "hostfile `/no` does not exist"),
    ("launch RUN --emit pbs", "`--emit`: no option of this command"),
    ("config shwo RUN", "invalid choice: 'shwo'"),
    ("config show /no.yaml", "run file `/no.yaml` does not exist"),
    ("data show", "RUN.yaml"),
    ("data show /no.yaml", "run file `/no.yaml` does not exist"),
    ("checkpoint list /no", "/no holds no checkpoints"),
    ("checkpoint show /no", "/no holds no complete checkpoint"),
    ("checkpoint verify DIR", "holds no complete checkpoint"),
    ("report /no", "`/no` holds no run"),
    ("export /no DIR/out", "`/no` is not a folder"),
    ("export DIR", "but no OUT"),
    ("export DIR DIR/out --dtype int3", "unknown --dtype `int3`"),
    ("export DIR DIR/out --format tar", "format `tar` is not known"),
    ("eval DIR", "has nothing to score on"),
    ("ask /no x", "`/no` has no config.json"),
    ("ask DIR", "TEXT"),
    ("ask DIR x --max-new-tokens 0", "0 is not 1 or more"),
    ("ask DIR x --max-new-tokens many", "`many` is not a whole number"),
    ("chat /no", "`/no` has no config.json"),
    ("serve /no", "`/no` has no config.json"),
    ("serve DIR --port 99999", "99999"),
    ("serve DIR --port http", "http"),
    ("serve DIR --engine tgi", "invalid choice: 'tgi'"),
    ("watch /no", "`/no` is not a folder"),
    ("watch DIR --port -1", "-1 is not 0 to 65535"),
    ("sweep /no.yaml", "run file `/no.yaml` does not exist"),
    ("sweep RUN", "is a run file, but a sweep needs a sweep file"),
    ("teach RUN", "OUT"),
    ("doctor --hostfile /no", "hostfile `/no` does not exist"),
    ("sweep RUN --from 1", "`--from`: no option of this command"),
    ("sweep RUN --ranks 2", "--ranks has no effect without --lr-range"),
    ("sweep RUN --lr-range 1e-8", "`1e-8` is not LOW,HIGH"),
    ("demo", "FOLDER"),
)
"""Words after `ds-finetune`, and a part of what it prints."""
FILES: tuple[tuple[bytes, str], ...] = (
    (b"", "holds nothing, not a mapping"),
    (b"[]", "holds a list, not a mapping"),
    (b"5", "holds a number, not a mapping"),
    (b"model: a\nmodel: b\n", "`model` is given twice, in lines 1 and 2"),
    (b"model: x\noptim: {lr: 1}\noptim: {lr: 2}\n", "`optim` is given twice, in lines 2 and 3"),
    (b"model: [\n", "cannot be read as YAML"),
    (b"{model: x", "cannot be read as YAML"),
    (b"\tmodel: x\n", "character '\\t'"),
    (b"model: x\n data: y\n", "line 2, column 6"),
    (b"model: a: b\n", "line 1, column 9"),
    (b"model: !!python/object:os.system x\n", "tag:yaml.org,2002:python/object:os.system"),
    (b"model: &a [*a]\n", "`*a` in line 1 contains itself"),
    (b"model: \xff\xfe\n", "is not UTF-8"),
    (b"model: x\n", "`data` is missing"),
    (b"data: x\n", "`data` is 'x'"),
    (b"model: x\ndata:\n", "`data` is None"),
    (b"model: x\ndata: {train: a}\nlr: 1\n", "line 3: unknown key `lr`"),
    (b"model: x\ndata: {train: a}\noutput_dir: 5\n", "line 3: `output_dir` is 5"),
    (b"model: x\ndata: {train: {a: 0}}\n", "`a` has the weight 0"),
    (b"model: x\ndata: {train: {a: -1}}\n", "`a` has the weight -1"),
    (b"model: x\ndata: {train: {}}\n", "the mapping is empty: name files"),
)
"""Run files, and a part of the error of `config show`."""
ROW = '{"prompt": "a", "completion": "b"}\n'
ROWS: tuple[tuple[str, str, str], ...] = (
    ("", "", "is empty"),
    ("\n\n", "", "have 0 rows"),
    ("{", "", "line 1 column 2 is not JSON"),
    (ROW + "no JSON\n", "", "line 2 column 1 is not JSON"),
    ("prompt,completion\na,b\n", "", "line 1 column 1 is not JSON"),
    ("[1, 2]\n", "", "line 1 is a list, not an object"),
    ("5\n", "", "line 1 is a number, not an object"),
    ("null\n", "", "line 1 is null, not an object"),
    ("{}\n", "", "line 1 has columns"),
    ('{"prompt": "a"}\n', "", "line 1 has columns prompt"),
    ('{"promt": "a", "completion": "b"}\n', "", "columns completion, promt"),
    ('{"prompt": 1, "completion": 2}\n', "", "column `prompt` is int 1"),
    ('{"prompt": "a", "completion": null}\n', "", "column `completion` is null"),
    ('{"prompt": "a", "completion": "\\ud800"}\n', "", "lone surrogate U+D800"),
    ('{"text": 5}\n', "", "column `text` is int 5"),
    ('{"text": ""}\n', "", "none of the 1 rows"),
    ('{"messages": []}\n', "", "`messages` is list []"),
    ('{"messages": "hi"}\n', "", "`messages` is str 'hi'"),
    ('{"messages": [{"role": "user"}]}\n', "", "message 1 of `messages`"),
    ('{"messages": [{"content": "x"}]}\n', "", "unknown role None in message 1"),
    ('{"messages": [{"role": "robot", "content": "x"}]}\n', "", "unknown role 'robot'"),
    ('{"messages": [{"role": "user", "content": "x"}]}\n', "", "1 without supervised tokens"),
    (ROW, "objective=dpo", "trained on pairs of a chosen and a rejected answer"),
    (ROW, "objective=reward", "trained on pairs of a chosen and a rejected answer"),
    (ROW, "objective=kto", "answers that are labelled good or bad"),
    ('{"prompt": "a", "chosen": "b"}\n', "objective=dpo", "columns chosen, prompt"),
    ('{"prompt": "a", "chosen": "b", "rejected": "b"}\n', "objective=dpo", "have the same tokens"),
    ('{"prompt": "a", "completion": "b", "label": "maybe"}\n', "objective=kto", "column `label` is str 'maybe'"),
    (ROW, "data.layout=alpaca", "has no column `instruction`"),
    (ROW, "data.columns={prompt: question}", "data.columns {prompt: question} has no effect"),
    (ROW, "data.columns={promt: prompt}", "data.columns {promt: prompt} has no effect"),
    (ROW, "data.template=/no.jinja", "data.template `/no.jinja` does not exist"),
    (ROW, "data.train=/no.jsonl", "data file `/no.jsonl` does not exist"),
    (ROW, "data.train=/no/*.jsonl", "no data file matches `/no/*.jsonl`"),
    (ROW, "data.train=[]", "0 rows"),
    (ROW, "model.tokenizer=/no", "model `/no` is not a folder"),
)
"""Rows, an override, and a part of the error of `data show`."""
Call = Callable[[Path], Any]
CALLS: tuple[tuple[Call, str], ...] = (
    (lambda _: ds_finetune.train("/no.yaml"), "run file `/no.yaml` does not exist"),
    (lambda _: ds_finetune.train({}), "`model` is missing"),
    (lambda _: ds_finetune.train(5), "the run's configuration is 5"),  # type: ignore[arg-type]
    (lambda _: ds_finetune.train(None), "the run's configuration is None"),  # type: ignore[arg-type]
    (lambda _: ds_finetune.train({"model": "x", "data": {"train": "a"}, "lr": 1}), "unknown key `lr`"),
    (lambda at: ds_finetune.train(at / "run.yaml", ["optim.lr"]), "override `optim.lr` is not of the form"),
    (lambda at: ds_finetune.train(at / "run.yaml", "optim.lr=1"), "`overrides` is 'optim.lr=1'"),
    (lambda at: ds_finetune.train(at / "run.yaml", [5]), "`overrides` is [5]"),  # type: ignore[list-item]
    (lambda at: ds_finetune.train(at / "run.yaml", rows=5), "are a `int`"),  # type: ignore[arg-type]
    (lambda at: ds_finetune.train(at / "run.yaml", rows=[]), "data.train has 0 rows"),
    (lambda at: ds_finetune.train(at / "run.yaml", rows=[5]), "row 1 of data.train is a `int`"),  # type: ignore[list-item]
    (lambda at: ds_finetune.export_model("/no", at / "out"), "`/no` is not a folder"),
    (lambda at: ds_finetune.export_model(5, at / "out"), "source is 5"),  # type: ignore[arg-type]
    (lambda at: ds_finetune.export_model(at, at / "out", format="tar"), "format `tar` is not known"),  # type: ignore[arg-type]
    (lambda at: ds_finetune.export_model(at, at / "out", dtype="int3"), "unknown --dtype `int3`"),
    (lambda at: ds_finetune.export_model(at, at / "out", max_shard_size="huge"), "`huge` is not a size with a unit"),
    (lambda at: ds_finetune.evaluate("/no", at / "train.jsonl"), "model `/no` is not a folder"),
    (lambda at: ds_finetune.evaluate(at / "model", []), "has nothing to score on"),
    (lambda at: ds_finetune.evaluate(at / "model", at / "train.jsonl", objective="orpp"), "`objective` is 'orpp'"),
    (lambda at: ds_finetune.evaluate(at / "model", at / "train.jsonl", max_seq_len=0), "max_seq_len is 0"),
    (lambda at: ds_finetune.evaluate(at / "model", at / "train.jsonl", limit="x"), "limit is 'x'"),  # type: ignore[arg-type]
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the program prints about the mistake, with exit code 2."""
    is_of_argparse = False
    try:
        code: object = main(list(words))
    except SystemExit as refused:
        code, is_of_argparse = refused.code, True
    assert code == 2
    printed = capsys.readouterr().err
    if not is_of_argparse:
        assert printed.startswith("error: ")
        assert printed.count("\n  hint: ") == 1
    return printed


@pytest.mark.parametrize(("override", "part"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_an_override_that_is_wrong(override: str, part: str, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in _error(capsys, "plan", str(demo / "run.yaml"), override)


@pytest.mark.parametrize(("words", "part"), FLAGS, ids=[words for words, _ in FLAGS])
def test_a_flag_that_is_wrong(words: str, part: str, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words.replace("RUN", str(demo / "run.yaml")).replace("DIR", str(demo)).split()
    assert part in _error(capsys, *given)


@pytest.mark.parametrize(("content", "part"), FILES, ids=[repr(content) for content, _ in FILES])
def test_a_run_file_that_is_wrong(
    content: bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert part in _error(capsys, "config", "show", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(("rows", "override", "part"), ROWS, ids=[f"{rows!r} {more}" for rows, more, _ in ROWS])
def test_rows_that_are_wrong(
    rows: str, override: str, part: str, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {demo}/model, weights: random}}\n"
        f"data: {{train: {tmp_path}/rows.jsonl, workers: 0, cache_dir: {tmp_path}/cache}}\n"
        "train: {for: 2 steps, global_batch_size: 1, micro_batch_size: 1, max_seq_len: 64}\n"
        f"output_dir: {tmp_path}/run\n"
    )
    assert part in _error(capsys, "data", "show", str(tmp_path / "run.yaml"), *[override] * bool(override))


@pytest.mark.parametrize(("call", "part"), CALLS, ids=[part for _, part in CALLS])
def test_a_call_that_is_wrong(call: Call, part: str, demo: Path) -> None:
    with pytest.raises(FinetuneError) as refused:
        call(demo)
    assert part in refused.value.message
    assert refused.value.hint


def test_there_are_many_mistakes() -> None:
    assert len(OVERRIDES) + len(FLAGS) + len(FILES) + len(ROWS) + len(CALLS) > 250
