"""Forward and backward of 64 experts, six per token, beside transformers' implementations: `python bench/experts.py`.

Timed is the CPU time of one thread for the experts module of a DeepSeek-V3 with the proportions of DeepSeek-V2-Lite
(hidden 16 / 11 of the experts' width) and all its gradients. Each round draws other tokens and other choices, as in
training, and runs every implementation on them by turns; the first round is not timed. The medians' ratios say how
many times as fast `ds_finetune` is. Printed beside them is the time of the products alone, with equally
many rows for each expert and written to memory that exists: none with these products can be faster.
"""

import argparse
import statistics
import sys
import time

import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from ds_finetune.model.experts import BY_EXPERT

EXPERTS, PER_TOKEN = 64, 6
LOOP, GROUPED = "eager", "grouped_mm"
"""Not run: `batched_mm`, which copies the weights of every choice and takes 30 times as long as `grouped_mm`."""


def main() -> None:
    """Print seconds, ratios and the largest difference for each dtype and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=352)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in arguments.dtypes:
        for tokens in arguments.tokens:
            module = make_experts(arguments.hidden, arguments.inner, getattr(torch, dtype))
            names = [LOOP, GROUPED, BY_EXPERT]
            seconds, difference = time_by_turns(module, names, tokens=tokens, rounds=arguments.rounds)
            mine = statistics.median(seconds[BY_EXPERT])
            times = ", ".join(
                f"{name} {statistics.median(found) * 1e3:.1f} ms ({statistics.median(found) / mine:.2f} x)"
                for name, found in seconds.items()
            )
            bare = time_products(module, tokens * PER_TOKEN // EXPERTS, rounds=arguments.rounds)
            sys.stdout.write(
                f"{dtype}, {tokens} tokens: {times}; products alone {bare * 1e3:.1f} ms; "
                f"outputs and gradients differ by {difference:.1e}\n"
            )
            sys.stdout.flush()


def make_experts(hidden: int, inner: int, dtype: torch.dtype) -> DeepseekV3Experts:
    """Experts with random weights."""
    config = DeepseekV3Config(
        hidden_size=hidden, moe_intermediate_size=inner, n_routed_experts=EXPERTS, num_experts_per_tok=PER_TOKEN
    )
    module = DeepseekV3Experts(config).to(dtype)
    torch.manual_seed(0)
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return module


def time_by_turns(
    module: DeepseekV3Experts, names: list[str], *, tokens: int, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """CPU seconds of each implementation in each round, and the largest difference from the loop's results."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    largest = 0.0
    for number in range(rounds + 1):
        dtype, width = module.gate_up_proj.dtype, module.gate_up_proj.shape[2]
        hidden, gradient = (torch.randn(tokens, width).to(dtype) for _ in range(2))
        weights, chosen = torch.rand(tokens, EXPERTS).topk(PER_TOKEN)
        hidden.requires_grad_()
        weights = weights.softmax(-1).requires_grad_()
        wanted: list[torch.Tensor] = []
        for name in names:
            module.config._experts_implementation = name
            began = time.process_time()
            out = module(hidden, chosen, weights)
            found = [out, *torch.autograd.grad(out, [hidden, weights, *module.parameters()], gradient)]
            if number:
                seconds[name].append(time.process_time() - began)
            found = [each.detach() for each in found]
            wanted = wanted or found
            largest = max(largest, *(difference(a, b) for a, b in zip(found, wanted, strict=True)))
    return seconds, largest


def time_products(module: DeepseekV3Experts, rows: int, *, rounds: int) -> float:
    """CPU seconds of the six products of every expert on `rows` rows, forward and backward; least of `rounds`."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    columns, width = gate_up.shape[1:]
    hidden, gated, inner = (gate_up.new_ones(rows, size) for size in (width, columns, columns // 2))
    out, gated_out, inner_out = map(torch.empty_like, (hidden, gated, inner))
    d_gate_up, d_down = torch.empty_like(gate_up), torch.empty_like(down)
    least = float("inf")
    for _ in range(rounds + 1):
        began = time.process_time()
        for expert in range(EXPERTS):
            torch.mm(hidden, gate_up[expert].T, out=gated_out)
            torch.mm(inner, down[expert].T, out=out)
            torch.mm(hidden, down[expert], out=inner_out)
            torch.mm(hidden.T, inner, out=d_down[expert])
            torch.mm(gated, gate_up[expert], out=out)
            torch.mm(gated.T, hidden, out=d_gate_up[expert])
        least = min(least, time.process_time() - began)
    return least


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference relative to that of `wanted`."""
    return float(torch.linalg.norm((found - wanted).float()) / torch.linalg.norm(wanted.float()))


if __name__ == "__main__":
    main()
