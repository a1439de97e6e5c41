"""One call for all documents of a forward equals a call for each, with a plain stand-in for the kernel of GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from ds_finetune.model.attention import by_document as attention
from ds_finetune.model.attention import kernels
from ds_finetune.model.attention.by_document import BY_DOCUMENT, attend_by_document
from ds_finetune.model.attention.kernels import PackedDocuments, pack_documents, pads_values
from ds_finetune.model.build.encoder import encoder_inputs
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel, install_loss_head
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.weights.load import initialise_weights
from tests.model.attention.test_attention import ADDITIONS, CONFIGS, LENGTHS, WINDOW, WINDOWS
from tests.model.encoders import ENCODERS, encoder_config, packed_rows
from tests.model.encoders import LENGTHS as ENCODER_LENGTHS
from tests.model.plain_varlen import plain_varlen_attn
from tests.rounding import differing_gradients, rounding, rounding_of_outputs

SHAPES = {
    "plain": (4, 4, 8, 8),
    "grouped queries": (4, 2, 16, 16),
    "narrow values": (2, 2, 24, 16),
    "wide values": (2, 1, 8, 16),
    "odd width": (2, 1, 6, 6),
}
"""Heads, heads of keys, columns of keys and of values."""
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


class Module(nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the stand-in's calls."""
    found: list[tuple[Any, ...]] = []

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        found.append(args)
        return plain_varlen_attn(*args, **options)

    monkeypatch.setattr(kernels, "varlen_attn", attend)
    return found


def _parts(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value of the rows of LENGTHS, as models make them: heads are a transposed axis."""
    heads, key_heads, width, value_width = shape
    generator = torch.Generator().manual_seed(1)
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [torch.randn(3, 16, *size, generator=generator).to(dtype).transpose(1, 2) for size in sizes]


def _out_and_gradients(parts: list[torch.Tensor], module: Module, **options: Any) -> list[torch.Tensor]:
    parts = [part.detach().requires_grad_() for part in parts]
    out, _ = attend_by_document(module, *parts, None, scaling=0.3, documents=LENGTHS, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    out.backward(weights)
    return [out.detach(), *(part.grad for part in parts if part.grad is not None)]


def _rounding(shape: tuple[int, int, int, int]) -> float:
    """Of the gradient of a key in fp64, which sums most: over queries and heads of its group, and in each over the
    columns of values. None of the factors (query, value and gradient of the output) is larger than 5.
    """
    heads, key_heads, width, value_width = shape
    additions = 16 * heads // key_heads * max(width, value_width)
    return rounding(5.0**3 * additions, additions, torch.float64)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 15, 16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_a_call_for_each_document(
    shape: tuple[int, int, int, int], window: int | None, is_causal: bool, calls: list[Any]
) -> None:
    packed = pack_documents(LENGTHS, torch.device("cpu"))
    assert packed.bounds.tolist() == [0, 5, 14, 16, 32, 33, 34, 48]
    options: dict[str, Any] = {"module": Module(is_causal=is_causal), "sliding_window": window}
    wanted = _out_and_gradients(_parts(shape, torch.float64), **options)
    assert not calls
    found = _out_and_gradients(_parts(shape, torch.float64), packed=packed, **options)
    assert len(calls) == 1
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < _rounding(shape)


@pytest.mark.parametrize(
    "options",
    [{"s_aux": torch.zeros(4)}, {"chosen": ((None,) * 3, (torch.ones(16, 16).tril().bool(),), (None,) * 3)}],
    ids=("sinks", "chosen keys"),
)
def test_what_the_kernel_lacks_is_done_by_document(options: dict[str, Any], calls: list[Any]) -> None:
    packed = pack_documents(LENGTHS, torch.device("cpu"))
    shape = SHAPES["plain"]
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            _out_and_gradients(_parts(shape), Module(), packed=packed, **options),
            _out_and_gradients(_parts(shape), Module(), **options),
            strict=True,
        )
    )
    attend_by_document(Module(), *_parts(shape), None, scaling=1.0, documents=LENGTHS, packed=packed, dropout=0.5)
    assert not calls


def test_a_sequence_parallel_rank_attends_after_it_has_all_tokens(calls: list[Any], tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    group, packed = SequenceParallelGroup(dist.group.WORLD, 1, 0), pack_documents(LENGTHS, torch.device("cpu"))
    shape = SHAPES["grouped queries"]
    parts = _parts(shape, torch.float64)
    found = _out_and_gradients(parts, Module(), packed=packed, sp_group=group)
    wanted = _out_and_gradients(parts, Module(), sp_group=group)
    assert len(calls) == 1
    assert all((one - other).abs().max() < _rounding(shape) for one, other in zip(found, wanted, strict=True))


def _model(family: str, extra: dict[str, Any]) -> TrainedModel:
    config = AutoConfig.for_model(family, **CONFIGS[family] | extra)
    lm = build_skeleton(config, attention="varlen", dtype=torch.float32, device="cpu")
    initialise_weights(lm, seed=2)
    install_loss_head(lm)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    return TrainedModel(lm)


def _loss_and_gradients(model: TrainedModel) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 90, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    model.zero_grad()
    loss = model(ForwardRows(ids, positions, ids.roll(-1, 1), LENGTHS)).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        *((family, {}) for family in ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "deepseek_v2", "qwen3", "olmoe")),
        *((kind, WINDOW | extra) for kind, extra in WINDOWS[1::3]),
    ],
    ids=str,
)
def test_models_attend_once_in_each_layer(family: str, extra: dict[str, Any], calls: list[Any]) -> None:
    """And once more where a layer is computed again in backward; the bounds are made once for all of them."""
    model = _model(family, extra)
    wanted, wanted_gradients = _loss_and_gradients(model)
    assert not calls
    model.packs_documents = True
    loss, gradients = _loss_and_gradients(model)
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert len({id(call[3]) for call in calls}) == 1
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert not differing_gradients(gradients, wanted_gradients, additions=ADDITIONS)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_attend_in_both_directions(name: str, calls: list[Any]) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(encoder_config(name)).eval()
    model.set_attn_implementation(BY_DOCUMENT)
    ids, positions, types, _ = packed_rows()
    inputs = encoder_inputs(model.config, positions, types) | {"input_ids": ids, "documents": ENCODER_LENGTHS}
    wanted = model.base_model(use_cache=False, **inputs).last_hidden_state
    packed = pack_documents(ENCODER_LENGTHS, torch.device("cpu"))
    found = model.base_model(use_cache=False, packed=packed, **inputs).last_hidden_state
    assert len(calls) == model.config.num_hidden_layers
    assert (found - wanted).abs().max() < rounding_of_outputs(model.config, wanted, tokens=ids.shape[1])


def test_values_are_padded_where_a_faster_kernel_takes_them() -> None:
    """On GPUs in half precision without a mask; on CPUs in long documents."""
    meta = torch.device("meta")

    def choice(keys: int, dtype: torch.dtype, *, width: int = 192, values: int = 128, is_masked: bool = False) -> bool:
        query, value = (torch.empty(1, 2, keys, size, dtype=dtype, device=meta) for size in (width, values))
        return pads_values(query, value, is_masked=is_masked)

    assert choice(8, torch.bfloat16)
    assert choice(8, torch.float16)
    assert not choice(8, torch.float32)
    assert not choice(8, torch.bfloat16, is_masked=True)
    assert not choice(8, torch.bfloat16, width=320)
    assert not choice(8, torch.bfloat16, values=192)
    query, value = torch.empty(1, 2, 1024, 24), torch.empty(1, 2, 1024, 16)
    assert pads_values(query, value, is_masked=False)
    assert not pads_values(query[:, :, 1:], value[:, :, 1:], is_masked=False)


def test_padded_values_are_cut_again() -> None:
    query, key, value = _parts(SHAPES["narrow values"])
    found, wanted = (
        kernels.attend_document(query, key, value, is_padded=is_padded, scale=0.3, is_causal=True)
        for is_padded in (True, False)
    )
    assert found.shape == value.shape
    assert (found - wanted).abs().max() < rounding(float(value.abs().max()), key.shape[2] + key.shape[3])


def test_shapes_by_torchs_own_function() -> None:
    """On the meta device, which has shapes and types and no numbers."""
    parts = [part.to("meta").requires_grad_() for part in _parts((4, 2, 24, 16), torch.bfloat16)]
    bounds = torch.empty(8, dtype=torch.int32, device="meta")
    out, _ = attend_by_document(Module(), *parts, None, scaling=0.3, packed=PackedDocuments(bounds, 16))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((3, 16, 4, 16), torch.bfloat16, True)
    out.backward(torch.empty_like(out))
    assert all(part.grad is not None and part.grad.shape == part.shape for part in parts)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (4, 4, 192, 128), (8, 2, 128, 128), (2, 2, 256, 256)], ids=str)
def test_the_kernel_of_gpus(
    shape: tuple[int, int, int, int], window: int | None, is_causal: bool, dtype: torch.dtype
) -> None:
    """Within rounding of attention by document in fp32."""
    parts = [part.cuda() for part in _parts(shape, dtype)]
    packed = pack_documents(LENGTHS, torch.device("cuda"))
    options: dict[str, Any] = {"module": Module(is_causal=is_causal), "sliding_window": window}
    found = _out_and_gradients(parts, packed=packed, **options)
    wanted = _out_and_gradients([part.float() for part in parts], **options)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.float(), other, rtol=4e-2, atol=4e-2)


@ON_GPU
@pytest.mark.parametrize("is_padded", [True, False])
def test_kernels_for_narrow_values_agree(is_padded: bool) -> None:
    query, key, value = (part.cuda() for part in _parts((4, 4, 192, 128), torch.bfloat16))
    found = kernels.attend_document(query, key, value, is_padded=is_padded, scale=0.07, is_causal=True)
    wanted = attention.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), scale=0.07, is_causal=True
    )
    assert torch.allclose(found.float(), wanted, rtol=4e-2, atol=4e-2)


CONTINUING = ((5, 4, 1, 3, 3), (2, 9, 5))
"""Documents of two rows."""
SHARED = ((0, 3, 3, 3, 0), (0, 1, 0))
"""How many tokens of an earlier document each of them continues."""
WHOLE = ((5, 7, 4, 6, 3), (2, 10, 5))
WHOLE_TOKENS = (
    *([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 9], [0, 1, 2, 10, 11, 12], [13, 14, 15]),
    *([16, 17], [16, *range(18, 27)], [*range(27, 32)]),
)
"""Tokens of the flattened rows of each document with those that it continues."""


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_document_may_continue_another(
    shape: tuple[int, int, int, int],
    is_packed: bool,
    window: int | None,
    with_sinks: bool,
    calls: list[Any],
) -> None:
    """Outputs and gradients are those of whole documents, in which the tokens that are shared stand several times."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(shape[0], shape[2]), (shape[1], shape[2]), (shape[1], shape[3])]
    parts = [torch.randn(2, 16, *size, generator=generator, dtype=torch.float64).transpose(1, 2) for size in sizes]
    sinks = torch.randn(shape[0], generator=generator, dtype=torch.float64) if with_sinks else None
    packed = pack_documents(CONTINUING, torch.device("cpu"), SHARED) if is_packed else None
    given = {"documents": CONTINUING, "shared": SHARED, "packed": packed}
    order = torch.tensor([token for tokens in WHOLE_TOKENS for token in tokens])
    own = [-length for lengths in CONTINUING for length in lengths]
    ends = torch.tensor([len(tokens) for tokens in WHOLE_TOKENS]).cumsum(0).tolist()
    places = torch.cat([torch.arange(end + length, end) for end, length in zip(ends, own, strict=True)])

    def attend(parts: list[torch.Tensor], **options: Any) -> torch.Tensor:
        options |= {"sliding_window": window, "s_aux": sinks}
        return attend_by_document(Module(), parts[0], parts[1], parts[2], None, scaling=0.3, **options)[0]

    def whole(parts: list[torch.Tensor]) -> torch.Tensor:
        rows = [part.transpose(1, 2).flatten(0, 1)[order][None].transpose(1, 2) for part in parts]
        documents = (tuple(length for lengths in WHOLE for length in lengths),)
        return attend(rows, documents=documents)[0][places].unflatten(0, (2, 16))

    results = []
    for compute in (whole, lambda parts: attend(parts, **given)):
        leaves = [part.detach().requires_grad_() for part in parts]
        out = compute(leaves)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
    assert bool(calls) == (is_packed and not with_sinks)
