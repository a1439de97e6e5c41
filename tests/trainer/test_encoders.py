"""What is refused of encoders before a run."""

from pathlib import Path

import pytest

from ds_finetune.cli.main import main
from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError
from ds_finetune.trainer.inputs import token_limits
from tests.encoder_task import encoder_task
from tests.model.encoders import encoder_config


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("parallel.tp=2", "of model_type bert is not tested"),
        ("parallel.sp=2", "of model_type bert is not tested"),
        ("lora={}", "lora of model_type bert is not tested"),
        ("model.attention=eager", "model.attention eager with model_type `bert`, an encoder"),
        ("objective=sft", "objective sft with model_type `bert`, an encoder"),
    ],
)
def test_what_is_not_tested_is_refused(
    override: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = encoder_task(tmp_path)
    assert main(["plan", str(run_file), "--gpus", "2", "--dry-run", override]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_two_positions_of_robertas_table_are_not_for_tokens(tmp_path: Path) -> None:
    config = read_config(encoder_task(tmp_path, name="roberta", train={"max_seq_len": 41}))
    with pytest.raises(ConfigError, match=r"train\.max_seq_len 41 is more than the 40 positions"):
        token_limits(config, encoder_config("roberta"))
