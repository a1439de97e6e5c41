"""The time limits of the watchdog and of torch's collectives: the watchdog must expire before torch's timeout."""

from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.errors import ConfigError

REPORT_SECONDS = 60.0
"""Time the watchdog needs after a limit expires to ask all ranks and end the run, on a lossy network too."""
_SPARE_SECONDS = 300.0
"""Added to the longest limit of the watchdog where `watchdog.collective` is `auto`."""


def longest_limit(watchdog: WatchdogConfig) -> float:
    """Seconds of the longest limit that the run file gives.

    An `auto` limit is not counted: `ProgressLimits` caps it `REPORT_SECONDS` below `collective_seconds`.
    """
    given = [watchdog.start, watchdog.other]
    given += [watchdog.limit] if watchdog.limit not in ("auto", "never") else []
    return max(map(seconds_of, given))


def collective_seconds(watchdog: WatchdogConfig) -> float:
    """How long torch lets a rank wait in a collective of any process group."""
    if watchdog.collective == "auto":
        return longest_limit(watchdog) + _SPARE_SECONDS
    return seconds_of(watchdog.collective)


def check_watchdog_before_torch_timeout(watchdog: WatchdogConfig) -> None:
    """ConfigError where torch would abort a collective before the watchdog can report which rank is at fault."""
    longest, timeout = longest_limit(watchdog), collective_seconds(watchdog)
    if watchdog.limit != "never" and timeout < longest + REPORT_SECONDS:
        raise ConfigError(
            f"watchdog.collective is {watchdog.collective}, and the longest of watchdog.limit, start and other is "
            f"{longest:.0f} seconds: torch would abort a collective before the watchdog reports which rank is at fault",
            hint=f"leave watchdog.collective out, or make it {longest + REPORT_SECONDS:.0f} seconds or more",
        )
