"""What the plan says of routed experts on GPUs."""

import pytest

from ds_finetune.plan.experts import experts_lines


@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [
        ("bf16", (9, 0), "torch's kernel for all experts"),
        ("bf16", (10, 3), "torch's kernel for all experts"),
        ("bf16", (8, 0), "runs on compute capability 9.x and 10.x, and this is 8.0"),
        ("bf16", (12, 0), "and this is 12.0"),
        ("bf16", (7, 5), "by transformers' loop"),
        ("bf16", None, "one kernel for all on compute capability 9.x and 10.x; a product for each expert"),
        ("fp16", (9, 0), "computes in bf16, not in fp16"),
        ("fp32", None, "computes in bf16, not in fp32"),
    ],
)
def test_the_line_names_the_implementation(precision: str, capability: tuple[int, int] | None, expected: str) -> None:
    tree = {"model_type": "deepseek_v3"}
    ((name, text),) = experts_lines(tree, device="cuda", precision=precision, capability=capability)
    assert name == "experts"
    assert expected in text
    assert (text == expected) == (expected == "torch's kernel for all experts")


@pytest.mark.parametrize(("kind", "device"), [("deepseek_v3", "cpu"), ("llama", "cuda"), ("some_other", "cuda")])
def test_without_known_experts_or_a_gpu_there_is_no_line(kind: str, device: str) -> None:
    assert experts_lines({"model_type": kind}, device=device, precision="bf16") == []
