"""Compile DeepSpeed's ops. Started as `build_worker.py BUILDER...`, with names of builders."""

import sys

import deepspeed.ops.op_builder as ops

for name in sys.argv[1:]:
    getattr(ops, name)().load(verbose=False)
