"""Known lines of other packages are not printed; errors, unknown warnings and unknown messages are."""

import logging
import os
import subprocess
import sys

import pytest

from ds_finetune.console.quiet import _bar_or_phase, deepspeed_level, quiet_packages
from ds_finetune.errors import ConfigError

# As torch 2.13 (distributed_c10d.py:4399, 4948) and DeepSpeed 0.19.8 (launcher/runner.py:214) say it.
PRINTS = """
import logging, warnings
import torch.distributed as dist
from deepspeed.utils import logger
from ds_finetune.console.quiet import quiet_packages
quiet_packages()
for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
    try:
        getattr(dist, name)(None, None)
    except Exception as error:
        print("raised", type(error).__name__)
warnings.warn("`gradient_checkpointing_enable` is deprecated and will be removed in v6.", FutureWarning)
warnings.warn("`torch.distributed.another` is deprecated", FutureWarning)
warnings.warn("planted")
logger.warning("Unable to find hostfile, will proceed with training with local resources only.")
logger.warning("planted for DeepSpeed")
logger.error("Unable to find hostfile, will proceed with training is an error")
"""


def run_script(script: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | environ
    )
    return done.stdout + done.stderr


def test_known_lines_are_dropped_and_others_shown() -> None:
    text = run_script(PRINTS)
    assert "all_gather_into_tensor" not in text
    assert "reduce_scatter_tensor" not in text
    assert "gradient_checkpointing_enable" not in text
    assert text.count("Unable to find hostfile") == 1
    assert "[ERROR]" in text
    for planted in ("`torch.distributed.another` is deprecated", "UserWarning: planted", "planted for DeepSpeed"):
        assert planted in text


def test_the_switch_shows_every_line() -> None:
    text = run_script(PRINTS, DS_LOG_LEVEL="info")
    for line in ("all_gather_into_tensor", "reduce_scatter_tensor", "[WARNING]"):
        assert line in text
    assert text.count("Unable to find hostfile") == 2


def test_bars_of_loading_and_writing_weights_are_not_drawn() -> None:
    def bar(*args: object, **kwargs: object) -> str:
        return f"bar of {kwargs['desc']}"

    shown = {desc: _bar_or_phase(bar, ([1, 2],), {"desc": desc}) for desc in ("Writing model shards", "another")}
    assert shown == {"Writing model shards": [1, 2], "another": "bar of another"}
    assert list(_bar_or_phase(bar, ([1, 2],), {"desc": "Loading weights"})) == [1, 2]


def test_another_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="DS_LOG_LEVEL is `loud`") as caught:
        quiet_packages({"DS_LOG_LEVEL": "loud"})
    assert caught.value.hint == "set it to debug, info, warning, or unset it"
    assert deepspeed_level({}) == "quiet"


def test_filters_are_added_once() -> None:
    quiet_packages({})
    before = len(logging.getLogger("DeepSpeed").filters)
    quiet_packages({})
    assert len(logging.getLogger("DeepSpeed").filters) == before
