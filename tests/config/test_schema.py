"""The run file: strict, with the nearest name and the line."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ds_finetune.config.invalid_keys import explain, section_keys
from ds_finetune.config.other_programs import KEYS_OF_OTHER_PROGRAMS
from ds_finetune.config.schema import RunConfig, dump_config, read_config
from ds_finetune.errors import ConfigError

MINIMAL = "model: some/model\ndata: {train: a.jsonl}\noutput_dir: runs/x\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_minimal_file_has_defaults_and_survives_a_round_trip(run_file: Path, tmp_path: Path) -> None:
    config = read_config(run_file)
    assert (config.model.path, config.data.train, config.train.duration) == ("some/model", ("a.jsonl",), "1 epochs")
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert read_config(again) == config


def test_files_have_names_or_weights(run_file: Path, tmp_path: Path) -> None:
    run_file.write_text(
        "model: m\ndata: {train: {org/name:train: 3, b.txt: 1}, eval: {old: a.txt, new: [b.txt, c.txt]}}\noutput_dir: o\n"
    )
    config = read_config(run_file)
    assert config.data.weights == {"org/name:train": 3, "b.txt": 1}
    assert config.data.paths("train") == ("org/name:train", "b.txt")
    assert config.data.held_out_sets == {"eval/old": ("a.txt",), "eval/new": ("b.txt", "c.txt")}
    assert config.data.paths("eval") == ("a.txt", "b.txt", "c.txt")
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert read_config(again) == config


def test_override_replaces_and_creates(run_file: Path) -> None:
    config = read_config(
        run_file, ["optim.lr=1e-3", "model.weights=random", "train.for = 3 epochs", "data.train=[a.json,b.json]"]
    )
    assert (config.optim.lr, config.model.weights, config.model.path) == (1e-3, "random", "some/model")
    assert (config.train.duration, config.data.train) == ("3 epochs", ("a.json", "b.json"))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "train: {micro_batchsize: 2}\n",
            "line 4: unknown key `train.micro_batchsize`",
            "did you mean `micro_batch_size`?",
        ),
        ("lora: {target: all-linear}\n", "unknown key `lora.target`", "did you mean `target_modules`?"),
        (
            "optim: {lr: 0}\n",
            "line 4: `optim.lr` is 0: it should be greater than 0",
            "`optim.lr` (above 0, by default 1e-05): Peak",
        ),
        (
            "eval: {every: }\ndeepspeed: {}\nlog: {trackers: }\n",
            "`log.trackers` is None: it should be a list",
            "or leave it out",
        ),
        (
            "eval: {every: 1e6 tokens}\n",
            "`eval.every` is '1e6 tokens': `1e6 tokens` is no number of steps or epochs",
            "`eval.every`: `N steps` or `N epochs` between evaluations",
        ),
        (
            "eval: {every: 10}\n",
            "`10` is no number of steps or epochs; write e.g. `100 steps`",
            "`eval.every`: `N steps`",
        ),
        ("optim: {betas: [0.9, 1.0]}\n", "`optim.betas` is 1.0: it should be less than 1", "(by default [0.9, 0.95])"),
        ("optim: {betas: [0.9]}\n", "`optim.betas` is [0.9]: it should have 2 values", "(by default [0.9, 0.95])"),
        ("optim: {betas: [1, 2, 3]}\n", "`optim.betas` is [1, 2, 3]: it should have 2 values", "[0.9, 0.95]"),
        ("optim: {warmup: 0.03}\n", "`0.03` is not a warm-up; write `3%` of the run or `100 steps`", "optim.warmup"),
        ("optim: {min_lr_ratio: 2}\n", "is 2: it should be at most 1", "(at least 0, at most 1, by default 0.1)"),
        ("deepspeed: 5\n", "`deepspeed` is 5: it should be a valid string", "a file of ds_configs/"),
        (
            "optim: {betas: [-0.1, 0.9]}\n",
            "`optim.betas` is -0.1: it should be at least 0",
            "by default",
        ),
        ("train: {for: 3 weeks}\n", "`train.for` is '3 weeks': `3 weeks` is not a duration", "`train.for` (by default"),
        (
            "data: {train: t, eval: {a b: x}}\n",
            "the name `a b` of a held-out set may have only letters, digits,",
            "`data.eval` (by default []): Held-out files",
        ),
        ("data: {train: t, eval: {}}\n", "the mapping is empty: name held-out sets", "`data."),
        ("data: {train: t, eval: {a: []}}\n", "it should be files, or a mapping of names to files", "`data."),
        ("data: {train: t, eval: true}\n", "`data.eval` is True: name files", "`data."),
        ("data: {train: {t: 0}}\n", "a mapping of files to weights above 0, and `t` has the weight 0", "`data."),
        ("data: {train: {t: .nan}}\n", "a mapping of files to weights above 0, and `t` has the weight nan", "`data."),
        ("data: {train: {}}\n", "the mapping is empty: name files with weights", "`data."),
        ("model: again\n", "`model` is given twice, in lines 1 and 4", "keep one"),
        ("data: [\n", "cannot be read as YAML", "indentation"),
    ],
)
def test_mistakes_name_line_and_way_out(run_file: Path, text: str, message: str, hint: str) -> None:
    run_file.write_text(MINIMAL + text if "data" not in text else text)
    with pytest.raises(ConfigError) as caught:
        read_config(run_file)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "override `optim.lr` is not of the form section.key=value"),
        ("output_dir.x=1", "`output_dir` is `runs/x`, not a section"),
        ("optim.lrr=1", "unknown key `optim.lrr`"),
    ],
)
def test_bad_override(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(run_file, [override])
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("log.every", "010", 10),
        ("log.every", "08", 8),
        ("log.every", "0x10", 16),
        ("log.every", "1_000", 1000),
        ("log.every", "1:30", None),
        ("optim.lr", "1:30.5", None),
        ("optim.lr", "1e-3", 0.001),
        ("output_dir", "007", "007"),
        ("output_dir", "2026-01-31", "2026-01-31"),
        ("output_dir", "12:30", "12:30"),
    ],
)
def test_numbers_are_those_that_people_write(key: str, written: str, expected: object, tmp_path: Path) -> None:
    """YAML 1.1 reads `010` as 8, `1:30` as 90 and `2026-01-31` as a date."""
    tree = yaml.safe_load(MINIMAL)
    rest = yaml.safe_dump({name: value for name, value in tree.items() if name != key})
    section, _, name = key.partition(".")
    text = f"{section}: {{{name}: {written}}}\n" if name else f"{section}: {written}\n"
    (tmp_path / "run.yaml").write_text(rest + text)
    for read in (
        lambda: read_config(tmp_path / "run.yaml"),
        lambda: read_config(tmp_path / "run.yaml", [f"{key}={written}"]),
    ):
        if expected is None:
            with pytest.raises(ConfigError, match=rf"`{key}` is '{written}'"):
                read()
        else:
            value: object = read()
            for part in key.split("."):
                value = getattr(value, part)
            assert value == expected


@pytest.mark.parametrize("name", ["x" * 256, "runs/" + "\xe9" * 128, '"a\\0b"'])
def test_a_name_that_no_folder_can_have_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL.replace("runs/x", name), encoding="utf-8")
    with pytest.raises(ConfigError, match="no file or folder can have this name"):
        read_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "override",
    [
        *("deepspeed={}", "model.path={}", "model.tokenizer={}", "data.train=data/{}.jsonl", "data.train={{{}: 0.5}}"),
        *("data.eval={{new: {}}}", "data.template={}", "lora.start={}", "objective={{name: distill, teacher: {}}}"),
        "checkpoint.resume={}",
    ],
)
def test_a_path_that_no_file_can_have_is_refused(override: str) -> None:
    """256 bytes: Linux's NAME_MAX is 255."""
    with pytest.raises(ConfigError, match="no file or folder can have this name") as caught:
        read_config(yaml.safe_load(MINIMAL), [override.format("\xe9" * 128)])
    assert override.partition("=")[0] in caught.value.message
    assert "it should be" not in caught.value.message
    assert "run-file.md" not in caught.value.hint


@pytest.mark.parametrize("name", ["~/runs/x", "$HOME/runs", "/data/${USER}/x"])
@pytest.mark.parametrize("key", ["output_dir", "data.cache_dir"])
def test_a_path_that_only_a_shell_expands_is_refused(key: str, name: str, tmp_path: Path) -> None:
    """A shell leaves `output_dir=~/runs` as it is, and a folder named `~` would be made in the working directory."""
    (tmp_path / "run.yaml").write_text(MINIMAL, encoding="utf-8")
    with pytest.raises(ConfigError, match="are not expanded, which"):
        read_config(tmp_path / "run.yaml", [f"{key}={name}"])
    read_config(tmp_path / "run.yaml", [f"{key}=/data/a~b/c$"])
    (tmp_path / "of $x").mkdir()
    read_config(tmp_path / "run.yaml", [f"{key}={tmp_path}/of $x"])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml` does not exist"):
        read_config(tmp_path / "none.yaml")


_NINE = "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [{', '.join(9 * [f'*x{i - 1}'])}]\n" for i in range(1, 12))
_MERGED = "x0: &x0 {k: 1}\n" + "".join(f"x{i}: &x{i} {{<<: [{', '.join(9 * [f'*x{i - 1}'])}]}}\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_NINE, "it has more than 50000 values"),
        (_NINE + "model: *x11\n", "it has more than 50000 values"),
        (_MERGED, "it has more than 50000 values"),
        ("data: [" + "1," * 100_000 + "]\n", "it has more than 50000 values at line 1"),
        ("data: " + "[" * 400_000, "it has more than 100 levels at line 1"),
        ("data: &a [*a]\n", "`*a` in line 1 contains itself"),
        ("data: &a\n  train: *a\n", "`*a` in line 2 contains itself"),
        ("data: &a {<<: *a}\n", "`*a` in line 1 contains itself"),
        ("train: {seed: !!timestamp 2001-99-99}\n", "month must be in 1..12"),
        (f"train: {{seed: {'9' * 5000}}}\n", "5000 digits"),
        ("train: {seed: !!float x}\n", "could not convert string to float"),
        ("x: " + "x" * 2**20, "has more than 1048576 bytes"),
    ],
)
def test_hostile_yaml_is_one_error(run_file: Path, text: str, message: str) -> None:
    run_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(run_file)
    assert message in caught.value.message
    assert len(caught.value.message) < 500


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        read_config("/dev/zero")


def test_aliases_and_merged_mappings_are_read(run_file: Path) -> None:
    run_file.write_text(MINIMAL + "checkpoint: {every: &n 7 steps}\ntrain: {for: *n, <<: {seed: 5}}\n")
    config = read_config(run_file)
    assert (str(config.checkpoint.every), str(config.train.duration), config.train.seed) == ("7 steps", "7 steps", 5)


def test_every_field_is_documented() -> None:
    schema = RunConfig.model_json_schema(by_alias=True)
    sections = [schema, *schema["$defs"].values()]
    silent = [
        f"{s['title']}.{name}"
        for s in sections
        for name, field in s["properties"].items()
        if not field.get("description")
    ]
    assert not silent


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "optim.lr"),
        ("batch_size", "train.global_batch_size"),
        ("epochs", "train.for"),
        ("num_train_epochs", "train.for"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("gradient_accumulation_steps", "train.global_batch_size"),
        ("max_length", "train.max_seq_len"),
        ("cutoff_len", "train.max_seq_len"),
        ("bf16", "train.precision"),
        ("lora_r", "lora.rank"),
        ("base_model", "model.path"),
        ("Gradient_Checkpointing", "train.activation_checkpointing"),
        ("max_eval_samples", "eval.limit"),
        ("lr", "optim.lr"),
        ("seed", "train.seed"),
    ],
)
@pytest.mark.parametrize("section", [(), ("train",), ("optim",)])
def test_words_of_other_programs_find_their_key(key: str, meant: str, section: tuple[str, ...]) -> None:
    if ".".join((*section, key)) == meant:
        return
    tree: dict[str, object] = {key: 1}
    for name in reversed(section):
        tree = {name: tree}
    with pytest.raises(ValidationError) as invalid:
        RunConfig.model_validate({"model": "m", "data": {"train": "a"}, "output_dir": "o"} | tree)
    error = explain(invalid.value, RunConfig, "run.yaml", {})
    assert f"unknown key `{'.'.join((*section, key))}`" in error.message
    assert f"did you mean `{meant}`?" in error.hint


def test_the_words_of_other_programs_name_keys_that_exist() -> None:
    words = [word for text in KEYS_OF_OTHER_PROGRAMS.values() for word in text.split()]
    assert len(words) == len(set(words)), "one word means one key"
    for key in KEYS_OF_OTHER_PROGRAMS:
        section, _, name = key.rpartition(".")
        assert name in (section_keys(RunConfig, section) if section else RunConfig.model_fields)


def test_infinity_is_no_value(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: a}\noutput_dir: o\n")
    with pytest.raises(ConfigError, match=r"`optim\.lr` is inf"):
        read_config(path, ["optim.lr=.inf"])


@pytest.mark.parametrize("given", ["train: {activation_checkpointing: true}", "gradient_checkpointing: false"])
def test_truth_values_of_recomputation_are_translated(given: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\ndata: {{train: a.jsonl}}\noutput_dir: o\n{given}\n")
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    assert "`full` for true, `none` for false" in refused.value.hint
