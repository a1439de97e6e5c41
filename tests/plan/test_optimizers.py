"""The table of optimizers: what each keeps and takes is read off its own class, and layouts that split parameters are
refused.
"""

import pytest
import torch

from ds_finetune.errors import ConfigError
from ds_finetune.plan import checks
from ds_finetune.plan.deepspeed_config import OPTIMIZERS
from tests.plan.test_plan import plan_of, zero

SIZE = 512
"""Rows and columns of a matrix. bitsandbytes quantises the state of 4096 numbers or more."""
OWN = [name for name, row in OPTIMIZERS.items() if row.of != "deepspeed"]


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    row = OPTIMIZERS[name]
    if row.of == "torch":
        return getattr(torch.optim, row.type)  # type: ignore[no-any-return]
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install 'ds_finetune[quantize]'")
    return getattr(bitsandbytes.optim, row.type)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OWN)
def test_the_state_is_what_the_class_keeps(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(SIZE, SIZE))
    # The arguments that DeepSpeed passes on.
    params = plan_of(zero(0), optim={"name": name}).deepspeed_config["optimizer"]["params"]
    optimizer = _class_of(name)([param], **params)
    param.grad = torch.ones_like(param)
    optimizer.step()
    # bitsandbytes keeps two tables of 256 numbers for a parameter of any size.
    kept = [value for key, value in optimizer.state[param].items() if torch.is_tensor(value) and key != "step"]
    size = sum(value.numel() * value.element_size() for value in kept if value.numel() != 256)
    expected = OPTIMIZERS[name].state_bytes
    if name == "adafactor":
        assert size / param.numel() == pytest.approx(4 / SIZE + 4 / SIZE)
        assert expected == 4 / 32 + 4 / 32
    else:
        assert size / param.numel() == expected


@pytest.mark.parametrize("name", OWN)
def test_names_are_read_in_any_case(name: str) -> None:
    """DeepSpeed takes the class of torch.optim by this name, of which `sgd` would be a module."""
    assert plan_of(zero(0), optim={"name": name.upper()}).deepspeed_config["optimizer"]["type"] == OPTIMIZERS[name].type


@pytest.mark.parametrize("name", ["Adafactor", "AdamW8bit"])
@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "sp"])
def test_layouts_that_split_parameters_are_refused(name: str, axis: str) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32"}
    with pytest.raises(ConfigError, match=f"optim.name {name}"):
        plan_of(zero(0), optim={"name": name}, parallel={axis: 2}, train=train)


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="AdamW8bit needs bitsandbytes") as found:
        plan_of(zero(0), optim={"name": "AdamW8bit"})
    assert "ds_finetune[quantize]" in found.value.hint
