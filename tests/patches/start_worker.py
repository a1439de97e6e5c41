"""A process that imports the trainer, builds a tiny model, takes a step and saves, and then uses what was deferred.

It prints what it found as JSON, for test_deferred_names.py.
"""

import json
import sys
from typing import Any

RARE = (
    "scipy.optimize",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.onnx",
    "trio",
    "setuptools",
)


def main() -> None:
    """Import, step, look, use."""
    import ds_finetune.trainer.train  # noqa: F401 - as a run does

    step()
    found: dict[str, Any] = {"imported": [name for name in RARE if name in sys.modules]}
    found["joined"] = import_extensions()
    json.dump(found | use_marks() | use_names(), sys.stdout)


def step() -> None:
    """A step of a tiny llama on the CPU, whose skeleton was built on the meta device before."""
    import torch
    from transformers import LlamaConfig

    from ds_finetune.model.build import build_skeleton

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    config = LlamaConfig(hidden_size=16, intermediate_size=16, **sizes)
    meta = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="meta")
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    model = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), differentiable=False)
    model(torch.arange(8)[None], position_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    save(next(iter(model.parameters())))


def save(weight: Any) -> None:
    """Write a weight as checkpoints are written, and read it back."""
    import tempfile
    from contextlib import nullcontext
    from pathlib import Path

    import torch

    from ds_finetune.checkpoint.part_sinks import FilePartSink
    from ds_finetune.checkpoint.part_storage import PartReader, read_state_groups, serialise_part
    from ds_finetune.engine.state import Slice, StateGroup

    flat = weight.detach().flatten()
    read = torch.zeros_like(flat)
    piece = Slice("weight/w", tuple(weight.shape), 0, len(flat), flat.dtype)
    with tempfile.TemporaryDirectory() as folder:
        sink = FilePartSink(Path(folder) / "part.safetensors")
        group = StateGroup((piece,), lambda _: nullcontext(lambda key: flat))
        serialise_part([group], sink, {"rank": 0}, share=(0, 1))
        sink.finish()
        reader = PartReader([Path(folder) / "part.safetensors"])
        read_state_groups([StateGroup((piece,), lambda _: nullcontext(lambda key: read))], reader, absent="")
    assert torch.equal(read, flat)


def import_extensions() -> list[bool]:
    """Whether torch compiles joined sources while it is told to, twice, and whether it does afterwards."""
    from ds_finetune.patches.torch_extensions import joined_sources

    with joined_sources():
        with joined_sources():
            from torch.utils import cpp_extension

            found = [hasattr(cpp_extension.load, "__wrapped__")]
        found.append(hasattr(cpp_extension.load, "__wrapped__"))
    return [*found, hasattr(cpp_extension.load, "__wrapped__")]


def use_marks() -> dict[str, Any]:
    """What the compiler knows of functions that were marked before it was imported."""
    import torch
    from torch._dynamo import trace_rules
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    recorded = PreTrainedModel.can_record_outputs.fget
    assert recorded is not None
    return {
        "allowed": trace_rules.is_callable_allowed(recorded),
        "disabled": hasattr(PagedAttentionCache.update, "__wrapped__"),
        "real": torch._dynamo.__name__ == "torch._dynamo" and callable(torch._dynamo.explain),
    }


def use_names() -> dict[str, Any]:
    """What stand-ins do before and after their modules are imported."""
    import torch
    from transformers.distributed import parallel_utils, sharding_utils
    from transformers.loss import loss_for_object_detection as detection

    found = {"instance": isinstance(torch.zeros(1), sharding_utils.DTensor)}
    rows, _ = detection.linear_sum_assignment(torch.eye(2).numpy())
    styles = parallel_utils.ALL_PARALLEL_STYLES
    from torch.distributed.tensor import DTensor, Replicate

    return found | {
        "assigned": rows.tolist(),
        "styles": sorted(styles)[:3],
        "placement": styles["colwise"].input_layouts == Replicate(),
        "subclass": issubclass(DTensor, sharding_utils.DTensor) and not issubclass(int, sharding_utils.DTensor),
    }


if __name__ == "__main__":
    main()
