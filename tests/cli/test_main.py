"""The command line: one error, the right exit code, launchers' extra arguments."""

import errno
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ds_finetune import __version__
from ds_finetune.cli import evaluate
from ds_finetune.cli import main as cli
from ds_finetune.cli.demo import questions, write_demo
from ds_finetune.config.schema import read_config
from ds_finetune.console import tables as console
from ds_finetune.console.phase_line import CLEAR_LINE
from ds_finetune.data.row_kind import DIALOGUE
from ds_finetune.data.samples import read_row
from ds_finetune.errors import ConfigError, DataError, RunError
from tests.conftest import ROOT
from tests.running import tiny_task


def test_an_error_carries_its_hint() -> None:
    assert str(ConfigError("a is 1", hint="use 2")) == "a is 1\n  hint: use 2"
    assert str(ConfigError("a is 1")) == "a is 1"
    assert (ConfigError("x").exit_code, RunError("x").exit_code) == (2, 1)


def test_local_rank_zero_prints_an_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "none.yaml"]) == 2
    assert (
        capsys.readouterr().err
        == "error: run file `none.yaml` does not exist\n  hint: give the run's YAML file as the first argument\n"
    )


def test_other_ranks_of_a_host_wait_and_print_it_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_QUIET_SECONDS", 0.01)
    os.environ.update({"RANK": "3", "LOCAL_RANK": "1"})
    assert cli.main(["config", "show", "none.yaml"]) == 2
    assert capsys.readouterr().err == "rank 3: run file `none.yaml` does not exist\n"


def test_ctrl_c_during_imports_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_finetune", "train", str(write_demo(tmp_path))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert "importing torch" in run.stdout.readline()
        run.send_signal(signal.SIGINT)
        rest, errors = run.communicate(timeout=300)
    assert (run.returncode, rest, errors) == (130, "", "error: interrupted\n")


FIRST_LINE = """
import sys
from ds_finetune.cli import main, train
def show(text):
    print(text, sorted({"torch", "transformers", "deepspeed"} & sys.modules.keys()), flush=True)
    sys.exit()
train.show_line = show
main.main(["train", sys.argv[1]])
"""


def test_the_first_line_comes_before_what_takes_seconds_to_import(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_LINE, str(write_demo(tmp_path))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.rstrip().endswith("importing torch, transformers and DeepSpeed []"), run.stderr


def test_a_line_replaces_the_progress_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(console, "OUT", Console(file=terminal, force_terminal=True, highlight=False, soft_wrap=True))
    terminal.write("step 19/40  loss 1.2")
    console.show_line("after 20 steps: memory")
    assert terminal.getvalue() == f"step 19/40  loss 1.2{CLEAR_LINE}after 20 steps: memory\n"


def test_names_and_texts_are_not_wrapped_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_pairs("plan", [("model", "x" * 200), ("data", "[a] text")])
    assert capsys.readouterr().out == f"plan\nmodel  {'x' * 200}\ndata   [a] text\n"


def test_eval_names_its_options_where_rows_do_not_fit() -> None:
    with pytest.raises(DataError) as caught:
        read_row({"q": "a", "a": "b"}, DIALOGUE, layout="auto", columns={"prompt": "question"}, where="row 1")
    assert "data.columns" in str(caught.value)
    assert "--column" in evaluate._with_flags(str(caught.value))
    assert "data." not in evaluate._with_flags(str(caught.value))
    assert evaluate._with_flags("set data.columns: {prompt: q, completion: a} and data.train_on") == (
        "set --column prompt=q --column completion=a and --train-on"
    )


ROWS = [
    ({"prompt": "a", "completion": "b"}, "sft", {}),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "sft", {}),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", {}),
    ({"prompt": "a", "completion": "b", "label": True}, "kto", {}),
    ({"prompt": "a", "completion": "b", "label": "math"}, "sft", {}),
    ({"text": "a", "label": "spam"}, "classification", {}),
    ({"text": "a", "label": 0.5}, "classification", {}),
    ({"text": "a"}, "pretrain", {}),
    ({"Question": "a", "Answer": "b"}, "sft", {"prompt": "Question", "completion": "Answer"}),
    ({"question": "a", "answer": "b"}, "sft", {"prompt": "question", "completion": "answer"}),
    ({"input": "a", "output": "b"}, "sft", {"prompt": "input", "completion": "output"}),
    ({"prompt": "a", "completions": "b"}, "sft", {"completion": "completions"}),
    ({"prompt": "a", "level": "b"}, "grpo", {}),
    # Columns as in DeepMath, ARC and SQuAD, and a row of a Parquet file of several layouts.
    ({"question": "a", "final_answer": "4", "difficulty": 3}, "grpo", {}),
    ({"question": "a", "choices": ["b", "c"], "answerKey": "A"}, "grpo", {}),
    ({"title": "t", "context": "c", "question": "a", "answers": {"text": ["b"]}}, "grpo", {}),
    ({"prompt": "a", "messages": None, "text": None}, "grpo", {}),
]


@pytest.mark.parametrize(("row", "objective", "columns"), ROWS)
def test_init_writes_a_run_file_for_rows(
    row: dict[str, object],
    objective: str,
    columns: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, out = tmp_path / "my rows: #1.jsonl", tmp_path / "mine.yaml"
    rows.write_text(json.dumps(row) + "\n")
    assert cli.main(["init", str(rows), "--out", str(out)]) == 0
    config = read_config(out)
    assert (config.data.train, config.data.columns) == ((str(rows),), columns)
    assert (config.objective.name, config.output_dir) == (objective, "runs/mine")
    assert f"next: ds-finetune data show {out}" in capsys.readouterr().out


@pytest.mark.parametrize(("row", "rate", "of_adapters"), [(2, 5e-7, 5e-6), (3, 1e-6, 1e-5), (0, 1e-5, 2e-4)])
def test_init_writes_the_documented_rates_and_the_models_positions(
    row: int, rate: float, of_adapters: float, tmp_path: Path
) -> None:
    """Rates of docs/how-to/preferences.md and lora.md, for dpo, kto and sft."""
    rows, out, model = tmp_path / "rows.jsonl", tmp_path / "run.yaml", tmp_path / "model"
    rows.write_text(json.dumps(ROWS[row][0]) + "\n")
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    assert cli.main(["init", str(rows), "--out", str(out), "--model", str(model)]) == 0
    config = read_config(out)
    assert (config.optim.lr, config.train.max_seq_len) == (rate, 512)
    said = out.read_text().partition("set optim.lr to about ")[2]
    assert float(said.split()[0]) == of_adapters


def test_a_run_is_asked_by_its_folder_or_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, export = tmp_path / "run", tmp_path / "run" / "export"
    export.mkdir(parents=True)
    (run / "plan.json").write_text('{"layout": "", "notes": []}')
    (tmp_path / "run.yaml").write_text(f"model: m\ndata: {{train: a.jsonl}}\noutput_dir: {run}\n")
    assert cli.main(["chat", str(run)]) == 2
    assert f"the run in `{run}` holds no export" in capsys.readouterr().err
    (export / "config.json").write_text("{}")
    for words in (["chat", str(run)], ["ask", f"{run}.yaml", "hi"], ["eval", f"{run}.yaml", "--data", "d"]):
        assert cli.main(words) == 2
        printed = capsys.readouterr()
        assert printed.out == f"{words[1]}: the export is {export}\n"
        assert f"`{export}` has a config.json but no weights" in printed.err


@pytest.mark.parametrize("beside", ["adapter", "adapter and model"])
@pytest.mark.parametrize("command", ["ask ADAPTER hi", "serve ADAPTER", "eval ADAPTER --data d", "plan RUN"])
def test_an_adapter_is_to_be_merged_first(
    command: str, beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder with an adapter and a model, transformers reads the base model that the adapter names."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    if "model" in beside:
        (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "models/base"}')
    (tmp_path / "run.yaml").write_text(f"model: {folder}\ndata: {{train: a.jsonl}}\noutput_dir: o\n")
    words = command.replace("ADAPTER", str(folder)).replace("RUN", str(tmp_path / "run.yaml")).split()
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        f"error: model `{folder}` is an adapter, not a model\n"
        f"  hint: merge it first: ds-finetune export {folder} OUT --base models/base\n"
    )


def test_a_high_learning_rate_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = str(write_demo(tmp_path))
    note = "optim.lr 2: a step changes each weight by up to that; usual are 1e-6 to 1e-3\n"
    assert cli.main(["plan", run_file, "optim.lr=2"]) == 0
    assert note in capsys.readouterr().out
    assert cli.main(["plan", run_file]) == 0
    assert "optim.lr" not in capsys.readouterr().out.replace("optim.lr_scheduler", "")


def test_init_refuses_unknown_rows_and_files_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text('{"foo": "a", "bar": "b"}\n')
    assert cli.main(["init", str(rows), "--out", str(out)]) == 2
    assert "has columns bar, foo, which fit no layout" in capsys.readouterr().err
    assert not out.exists()
    for row, message in (
        ('{"prompt": "a", "completion": null}', "column `completion` is null, not text"),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', "column `rejected` is int 3"),
    ):
        rows.write_text(row + "\n")
        assert cli.main(["init", str(rows), "--out", str(out)]) == 2, "grpo would read the prompt alone"
        assert message in capsys.readouterr().err
    rows.write_text('{"text": "a"}\n')
    out.write_text("mine")
    assert cli.main(["init", str(rows), "--out", str(out)]) == 2
    assert f"`{out}` exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


COMPLETED = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={last}
_shtab_ds_finetune
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "completed"), [("ds-finetune ini", "init"), ("ds-finetune plan --gpus-", "--gpus-per-node")]
)
def test_bash_completes_commands_and_options(
    words: str, completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    code = COMPLETED.format(script=script, words=words, last=len(words.split()) - 1)
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [completed]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "selftest" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["train"]])
def test_help_names_where_to_begin(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(text in said for text in ("ds-finetune init", "ds-finetune demo", "config schema", "docs/index.md"))


def test_overrides_may_come_before_and_after_options() -> None:
    arguments = cli.parse_arguments(["launch", "RUN.yaml", "optim.lr=1", "--nproc", "2", "train.seed=3"])
    assert arguments.overrides == ["optim.lr=1", "train.seed=3"]
    with pytest.raises(SystemExit):
        cli.parse_arguments(["launch", "RUN.yaml", "--nproc", "2", "more"])
    with pytest.raises(SystemExit):
        cli.parse_arguments(["launch", "RUN.yaml", "--npro=2"])


def test_what_deepspeed_adds_to_the_arguments_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_demo(tmp_path)
    assert cli.main(["config", "show", "--local_rank=1", str(run_file), "train.seed=3"]) == 0
    assert "seed: 3" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["config"]])
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_started_by_path_hides_no_module() -> None:
    """Run as launchers do: the package's folder is first on the path, and must not stay there."""
    code = "import runpy, sys; sys.argv = ['train.py', 'none.yaml']; runpy.run_path('ds_finetune/train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run file `none.yaml` does not exist" in done.stderr
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import runpy, sys; runpy.run_path('ds_finetune/train.py', run_name='x'); print('\\n'.join(sys.path))",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert listed[0] == str(ROOT)
    assert str(ROOT / "ds_finetune") not in listed


def test_the_demos_questions_are_all_different_and_right() -> None:
    pairs = list(questions())
    assert len(dict(pairs)) == len(pairs) == 36_500
    assert dict(pairs)["1969-07-20"] == "20 July 1969"
    assert pairs == list(questions())
    assert pairs != list(questions(seed=1))


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"ds-finetune {__version__}\n")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "latin.yaml").write_bytes("model: caf\u00e9".encode("latin-1"))
    (folder / "dir").mkdir()
    write_demo(folder)
    return folder


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("config show dir", "run file `dir` cannot be read: Is a directory"),
        ("config show latin.yaml", "run file `latin.yaml` is not UTF-8"),
        ("config show run.yaml/x", "run file `run.yaml/x` cannot be read: Not a directory"),
        ("train dir", "run file `dir` cannot be read"),
        ("selftest dir", "run file `dir` cannot be read"),
        ("doctor dir --hostfile x", "run file `dir` cannot be read"),
        ("plan dir --gpus 8 --dry-run", "run file `dir` cannot be read"),
        ("plan run.yaml --gpus 1 --dry-run deepspeed=dir", "deepspeed file `dir` cannot be read"),
        ("plan run.yaml --gpus 1 --dry-run deepspeed=latin.yaml", "deepspeed file `latin.yaml` is not UTF-8 text"),
        ("data show run.yaml data.template=dir", "data.template `dir` cannot be read"),
        ("demo run.yaml", "`run.yaml` cannot be written: Not a directory"),
        ("demo /proc/x", "`/proc/x` cannot be written"),
        ("export --check run.yaml", "`run.yaml` is not a folder"),
        ("ask model hi", "`model` has a config.json but no weights"),
        ("chat model", "`model` has a config.json but no weights"),
        ("serve model --engine transformers", "`model` has a config.json but no weights"),
        ("eval model --data eval.jsonl", "`model` has a config.json but no weights"),
        ("eval model --data eval.jsonl --json dir", "--json `dir` cannot be written: Is a directory"),
        ("sweep run.yaml", "run.yaml is a run file, but a sweep needs a sweep file"),
        (
            "launch run.yaml --nproc 2 --dry-run --ssh-args '",
            "ssh arguments `'` cannot be split into words: No closing quotation",
        ),
    ],
)
def test_wrong_paths_and_files_are_errors_without_a_traceback(
    command: str, message: str, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo)
    assert cli.main(command.split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "hint: " in printed


@pytest.mark.parametrize("command", ["--help", "doctor --help", "config show run.yaml"])
def test_commands_without_ranks_ignore_the_port_of_a_kubernetes_service(
    command: str, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    monkeypatch.chdir(demo)
    try:
        code = cli.main(command.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 0


def test_a_port_that_is_none_is_reported_by_commands_with_ranks(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    monkeypatch.chdir(demo)
    assert [cli.main(command.split()) for command in ("doctor", "train run.yaml")] == [2, 2]
    assert capsys.readouterr().err.count("MASTER_PORT is 'tcp://10.0.0.1:80'") == 2


def test_a_folder_that_is_not_there_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    commands = ("ask nowhere hi", "chat nowhere", "serve nowhere", "eval nowhere --data d", "export nowhere out")
    commands += ("export . full",)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    script = (
        "import sys; from ds_finetune.cli.main import main\n"
        f"codes = [main(command.split()) for command in {commands}]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[2, 2, 2, 2, 2, 2] False"
    assert done.stderr.count("`nowhere`") == len(commands) - 1
    assert "`full` is not empty" in done.stderr
    assert done.stderr.count("hint: ") == len(commands)


def test_overrides_are_not_among_the_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train"])
    assert "arguments are required: RUN.yaml\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ask F hi --max-new-tokens 0", "0 is not 1 or more"),
        ("chat F --max-new-tokens -5", "-5 is not 1 or more"),
        ("serve F --port 99999", "99999 is not 0 to 65535"),
        ("serve F --queue 0", "0 is not 1 or more"),
        ("eval F --data d --limit 0", "0 is not 1 or more"),
        ("eval F --data d --batch-tokens x", "`x` is not a whole number"),
        ("data show R --samples -1", "-1 is not 1 or more"),
        ("bench R --steps 0", "0 is not 1 or more"),
        ("selftest R --steps 1", "1 is not 2 or more"),
        ("plan R --dry-run --gpus -3", "-3 is not 1 or more"),
        ("launch R --nproc 2 --port 99999999", "99999999 is not 0 to 65535"),
        ("doctor R --port -1", "-1 is not 0 to 65535"),
    ],
)
def test_numbers_out_of_range_are_wrong_usage(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_ends_by_printing_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_finetune.trainer.run_records import Report
    from ds_finetune.trainer.show import show_next

    export = tmp_path / "my run" / "export"
    shutil.copytree(tiny_task(tmp_path / "task").parent / "model", export)
    show_next(Report(None, export.parent, (export,), 1.0))
    (export / "chat_template.jinja").unlink()
    show_next(Report(None, export.parent, (export,), 1.0))
    show_next(Report(None, export.parent, (), 1.0))
    show_next(Report(None, export.parent, (), 1.0, interrupted="SIGTERM"))
    assert capsys.readouterr().out.splitlines() == [
        f"next: ds-finetune chat '{export}'",
        f"next: ds-finetune ask '{export}' TEXT, which sends 'TEXT'",
        f"next: ds-finetune export '{export.parent}' OUT",
    ]


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("ds_finetune") == __version__


def test_the_demo_replaces_no_file_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be written again as it is."""
    folder = tmp_path / "demo"
    run_file = write_demo(folder, ranks=1, days=300)
    assert write_demo(folder, ranks=1, days=300) == run_file
    for name in ("train.jsonl", "run.yaml", "model/config.json"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_text("mine")
    assert cli.main(["demo", str(tmp_path / "new")]) == 2
    assert "has other files with its names: model/config.json, run.yaml, train.jsonl" in (capsys.readouterr().err)
    kept = {str(path.relative_to(tmp_path / "new")): path.read_text() for path in (tmp_path / "new").rglob("*.*")}
    assert kept == dict.fromkeys(("train.jsonl", "run.yaml", "model/config.json"), "mine")


@pytest.mark.parametrize("name", ["c, d", "x #1", "a: b", "{b}", "t\tb", "[é", "'q'", "l\n2", "n\x85", "- a"])
def test_the_run_files_of_demo_and_init_name_any_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    config = read_config(write_demo(folder, ranks=1, days=201))
    assert config.model.path == str(folder / "model")
    assert (config.data.train, config.data.eval) == ((str(folder / "train.jsonl"),), (str(folder / "eval.jsonl"),))
    assert config.output_dir == str(folder / "run")
    out = folder / "own.yaml"
    assert cli.main(["init", str(folder / "train.jsonl"), "--model", str(folder / "model"), "--out", str(out)]) == 0
    own = read_config(out)
    assert (own.model.path, own.data.train) == (str(folder / "model"), (str(folder / "train.jsonl"),))


def test_a_locale_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_CTYPE")}
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "ds_finetune", "report", str(tmp_path / "\u4f60")]
    done = subprocess.run(command, env=clean | ascii_locale, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the text encoding of this locale is" in done.stderr
    assert "hint: set PYTHONUTF8=1" in done.stderr
    done = subprocess.run(
        command, env=clean | {"PYTHONIOENCODING": "gbk:strict", "PYTHONUTF8": "1"}, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"holds no run" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["config schema", "init ROWS --out OWN"])
def test_output_that_a_full_disk_loses_is_an_error(command: str, tmp_path: Path) -> None:
    """`> FILE` on a full disk left an empty file behind an exit code of 0."""
    write_demo(tmp_path, ranks=1, days=201)
    paths = {"ROWS": tmp_path / "train.jsonl", "OWN": tmp_path / "own.yaml"}
    words = [str(paths.get(word, word)) for word in command.split()]
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(
            [sys.executable, "-m", "ds_finetune", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output, or a file, cannot be written: No space left on device")


def test_a_line_that_an_earlier_command_lost_is_no_error_of_this_one() -> None:
    console.LOST[:] = [OSError(errno.ENOSPC, "No space left on device")]
    assert cli.main(["config", "schema"]) == 0


def test_a_closed_standard_output_prints_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m ds_finetune config schema >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_whose_terminal_is_closed_ends_without_an_error(tmp_path: Path) -> None:
    """Writing to a terminal that is gone fails with EIO."""
    write_demo(tmp_path, ranks=1, days=201)
    terminal, output = os.openpty()
    os.close(terminal)
    words = ["init", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "own.yaml")]
    command = [sys.executable, "-m", "ds_finetune", *words]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    assert (tmp_path / "own.yaml").exists()
    assert (done.returncode, done.stderr) == (0, "")
