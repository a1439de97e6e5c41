"""The watchdog of a run: ranks meet at a store, and each is monitored from then on."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ds_finetune.config.schema import WatchdogConfig
from ds_finetune.engine.default_group import meet
from ds_finetune.schedule import seconds_of
from ds_finetune.watchdog.collectives import observe_collectives
from ds_finetune.watchdog.monitor import Monitor, start_monitor
from ds_finetune.watchdog.progress import HangLimits, RankProgress
from ds_finetune.world import World


@contextmanager
def start_watchdog(watchdog: WatchdogConfig, world: World, output_dir: Path) -> Iterator[tuple[Monitor, dist.Store]]:
    """Monitor every rank and its collectives from the moment the ranks have met; also yields the store they met at."""
    progress = RankProgress(world.rank, HangLimits.of(watchdog))
    store = meet(world, timeout=timedelta(seconds=seconds_of(watchdog.meet)))
    with observe_collectives(progress), start_monitor(progress, world, store, output_dir) as monitor:
        yield monitor, store
