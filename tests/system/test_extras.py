"""Training without the packages of pages, sweeps and serving, and what commands say that need them."""

import sys
from pathlib import Path

import pytest

from ds_finetune.cli.main import main
from ds_finetune.system.versions import require_extra, requirements_of
from tests.running import metrics, start, tiny_task
from tests.runs.report.made_runs import make_run

PAGES = ["bokeh", "starlette", "uvicorn"]
OPTIONAL = [*PAGES, "optuna", "fastapi", "openai"]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); "
"""Makes the packages of the first argument as absent as those that are not installed."""


def test_training_does_without_pages_and_says_what_is_missing(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path)
    code = f"{BLOCKED}import ds_finetune; from ds_finetune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = start([sys.executable, "-c", code, ",".join(OPTIONAL), "train", str(run_file)], fork=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    (line,) = [line for line in done.stdout.splitlines() if "REPORT NOT WRITTEN" in line]
    assert "needs bokeh, starlette, uvicorn: the extra `pages` is not installed" in line
    assert "pip install 'ds_finetune[pages]'" in line
    assert f"`ds-finetune report {run}` tries again" in line
    assert not (run / "report.html").exists()
    assert (run / "export" / "README.md").exists(), "a model card needs none of them"
    # Where the extra is installed, the page is written later.
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists()
    seconds = [record["perf/eta_seconds"] for record in metrics(tmp_path)]
    assert len(seconds) == 3
    assert seconds[0] > 0


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("report RUN", "bokeh", "pages"),
        ("report RUN RUN -o OUT", "bokeh", "pages"),
        ("watch RUN", "starlette", "pages"),
        ("sweep RUN/config.yaml --lr-range 1e-8,0.1", "bokeh", "pages"),
        ("sweep SWEEP", "optuna", "sweep"),
        ("sweep SWEEP", "bokeh", "sweep"),
    ],
)
def test_commands_name_the_extra_before_they_begin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    package: str,
    extra: str,
) -> None:
    run = make_run(tmp_path / "run")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"run: {run}/config.yaml\ntrials: 1\noutput_dir: {tmp_path}/sweep\nspace: {{optim.lr: {{choices: [0.1]}}}}\n"
    )
    names = {"RUN": str(run), "OUT": str(tmp_path / "out.html"), "SWEEP": str(sweep)}
    words = command.split()
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
    before = list(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"needs {package}: the extra `{extra}` is not installed" in error
    assert f"pip install 'ds_finetune[{extra}]'" in error
    assert {path.name for path in {*tmp_path.rglob("*")} - {*before}} <= {"README.md"}, "but for cards of models"


def test_extras_hold_what_they_name() -> None:
    """As pip resolves them: `sweep` has the packages of `pages`, and `all` those of each extra that is not for work on
    this program.
    """
    names = {extra: {line.name for line in requirements_of(extra)} for extra in ("all", "pages", "sweep", "serve")}
    assert names["pages"] == set(PAGES)
    assert names["sweep"] == {*PAGES, "optuna"}
    assert {"starlette", "uvicorn"} < names["serve"]
    assert names["all"] > names["pages"] | names["sweep"] | names["serve"]
    assert not {line.name for line in requirements_of()} & set(OPTIONAL)
    with pytest.raises(KeyError):
        requirements_of("none")
    assert require_extra("pages", "a page") is None
