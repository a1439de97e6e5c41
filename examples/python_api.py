"""The demo task from Python: plan, train, export a checkpoint, evaluate. About twenty seconds on a CPU: `python
examples/python_api.py FOLDER`.
"""

import sys
from pathlib import Path

from ds_finetune import evaluate, export_model, plan_run, read_config, train
from ds_finetune.cli.demo import write_demo


def main(folder: Path) -> None:
    """Write the task to `folder`, and everything that comes of it."""
    run_file = write_demo(folder, ranks=1, days=2_000)
    overrides = [
        "train.for=10 steps",
        "train.max_seq_len=128",
        "eval.every=5 steps",
        "eval.generate.prompts=4",
        "checkpoint.every=5 steps",
    ]
    config = read_config(
        run_file, [*overrides, "log.every=5", "log.trackers=[]", "deepspeed=zero1", "export.verify=false"]
    )

    planned = plan_run(config, gpus=2)
    print(
        f"on 2 GPUs: dp {planned.plan.dp}, ZeRO {planned.plan.zero_stage}, bytes of a rank: {dict(planned.state_bytes)}"
    )

    report = train(config)
    assert report.last is not None
    print(
        f"step {report.last.step}: train/loss {report.last.values['train/loss']:.3f}, "
        f"eval/loss {report.last.values['eval/loss']:.3f}"
    )

    exported = export_model(report.output_dir, folder / "exported", dtype="fp32")
    print(f"exported {exported.folder}")

    scored = evaluate(exported.folder, folder / "eval.jsonl", limit=50)
    for name, metric in scored.metrics.items():
        low, high = metric.interval
        print(f"{name} {metric.value:.3f}, 95% interval {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "api_demo"))
