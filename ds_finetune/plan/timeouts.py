"""Limits of the watchdog and of torch's collectives, of which the watchdog's must come first."""

from ds_finetune.config.schema import WatchdogConfig
from ds_finetune.errors import ConfigError
from ds_finetune.schedule import seconds_of

REPORT_SECONDS = 60.0
"""From a limit of the watchdog until every rank has answered, on a lossy network too, and the run is ended."""
_SPARE_SECONDS = 300.0


def longest_limit(watchdog: WatchdogConfig) -> float:
    """Seconds of the longest limit that the run file gives; one that follows from measured steps is cut off by
    itself.
    """
    given = [watchdog.start, watchdog.other]
    given += [watchdog.limit] if watchdog.limit not in ("auto", "never") else []
    return max(map(seconds_of, given))


def collective_seconds(watchdog: WatchdogConfig) -> float:
    """How long torch lets a rank wait in a collective of any process group."""
    if watchdog.collective == "auto":
        return longest_limit(watchdog) + _SPARE_SECONDS
    return seconds_of(watchdog.collective)


def refuse_late_watchdog(watchdog: WatchdogConfig) -> None:
    """ConfigError where torch would abort a collective before the watchdog can report which rank it waits for."""
    longest, timeout = longest_limit(watchdog), collective_seconds(watchdog)
    if watchdog.limit != "never" and timeout < longest + REPORT_SECONDS:
        raise ConfigError(
            f"watchdog.collective is {watchdog.collective}, and the longest of watchdog.limit, start and other is "
            f"{longest:.0f} seconds: torch would abort a collective before the watchdog reports which rank is at fault",
            hint=f"leave watchdog.collective out, or make it {longest + REPORT_SECONDS:.0f} seconds or more",
        )
