"""Compile DeepSpeed's operators. Started as `build_worker.py NAME...`."""

import sys

from ds_finetune.engine.ops.deepspeed_ops import build_op

for name in sys.argv[1:]:
    build_op(name)
