"""Runs the tests that the default suite leaves out, in slices that resume, and records what ran when.

    python scripts/slow_slices.py [--minutes N] [--record FILE] [--size N] [--status] [PATH...]

A slice has at most --size tests of one file. Slices that have passed at this commit are left out; of the others those
that never ran come first, then those that ran longest ago. Each slice adds a line to the record (default
.cache/slow_tests.jsonl): slice, tests, commit, date, passed, failed, skipped, seconds and the failing tests. An
interrupted slice leaves no line and runs again. --status prints what the record says of each file, and runs nothing.
Exit code 1 where a test failed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """Some tests of a file, under a name that changes with the tests."""

    name: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file of the tests."""
        return self.name.partition("#")[0]


def slices(tests: Sequence[str], size: int) -> list[Slice]:
    """The tests of each file in parts of at most `size`."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    found = []
    for file, every in files.items():
        for number, begin in enumerate(range(0, len(every), size)):
            part = tuple(every[begin : begin + size])
            digest = hashlib.sha256("\n".join(part).encode()).hexdigest()[:8]
            found.append(Slice(f"{file}#{number}-{digest}", part))
    return found


def newest(records: Sequence[Record]) -> dict[str, Record]:
    """The last record of each slice."""
    return {record["slice"]: record for record in records}


def to_run(every: Sequence[Slice], last: Mapping[str, Record], commit: str) -> list[Slice]:
    """The slices that have not passed at `commit`: those that never ran, then those that ran longest ago."""
    left = [each for each in every if not _has_passed(last.get(each.name), commit)]
    return sorted(left, key=lambda each: str(last[each.name]["date"]) if each.name in last else "")


def _has_passed(record: Record | None, commit: str) -> bool:
    return record is not None and record["commit"] == commit and not record["failed"]


def read_records(path: Path) -> list[Record]:
    """The lines of the record; a partial last one, as a kill may leave, is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def collect(paths: Sequence[str]) -> list[str]:
    """The ids of all slow tests."""
    done = _pytest("--collect-only", "-q", *paths)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode not in (0, 5):
        raise SystemExit(done.stdout + done.stderr)
    return tests


def _pytest(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-m", "slow", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_slice(each: Slice, commit: str) -> Record:
    """Run the tests of a slice; its line of the record."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ids, report = Path(folder, "tests"), Path(folder, "report.xml")
        ids.write_text("\n".join(each.tests) + "\n", encoding="utf-8")
        done = _pytest("-q", "--tb=short", f"--junitxml={report}", f"@{ids}")
        if done.returncode == 2 or not report.exists():
            raise SystemExit(f"{done.stdout}{done.stderr}\n{each.name} did not end; it is not recorded")
        results = list(_results(report))
    failed = [name for name, kind in results if kind == "failed"]
    if failed:
        sys.stdout.write(done.stdout)
    counts = Counter(kind for _, kind in results)
    return {
        "slice": each.name,
        "tests": len(each.tests),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - began, 1),
        "failing": failed,
    }


def _results(report: Path) -> Iterator[tuple[str, str]]:
    """The name of each test and whether it passed, failed or was skipped."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        yield f"{case.get('classname')}::{case.get('name')}", kind


def commit_of(root: Path = ROOT) -> str:
    """The commit of the checkout, with `+` where files differ from it."""
    found = [
        subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return found[0] + "+" * bool(found[1])


def status_lines(every: Sequence[Slice], last: Mapping[str, Record], commit: str) -> Iterator[str]:
    """For each file its tests, how many ran at this commit or ever, and the failures of the last time."""
    yield f"{'tests':>6} {'now':>6} {'ever':>6} {'failed':>6}  last        file"
    for file in dict.fromkeys(each.file for each in every):
        own = [each for each in every if each.file == file]
        known = [(each, last[each.name]) for each in own if each.name in last]
        counts = (
            sum(len(each.tests) for each in own),
            sum(len(each.tests) for each, record in known if record["commit"] == commit),
            sum(len(each.tests) for each, _ in known),
            sum(record["failed"] for _, record in known),
        )
        date = max((str(record["date"]) for _, record in known), default="never")[:10]
        yield " ".join(f"{count:>6}" for count in counts) + f"  {date:10}  {file}"


def main() -> int:
    """Run slices until all have passed or the time is over, or print the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders of tests (default all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no slice after this time")
    parser.add_argument("--record", type=Path, default=ROOT / ".cache" / "slow_tests.jsonl")
    parser.add_argument("--size", type=int, default=60, help="tests in a slice (default 60)")
    parser.add_argument("--status", action="store_true", help="print what ran when, and run nothing")
    asked = parser.parse_args()
    commit = commit_of()
    every, last = slices(collect(asked.paths), asked.size), newest(read_records(asked.record))
    if asked.status:
        sys.stdout.writelines(f"{line}\n" for line in status_lines(every, last, commit))
        return 0
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    left, failed, began = to_run(every, last, commit), 0, time.monotonic()
    for number, each in enumerate(left):
        if time.monotonic() - began > asked.minutes * 60:
            sys.stdout.write(f"{len(left) - number} of {len(every)} slices are left; the same command continues\n")
            break
        record = run_slice(each, commit)
        with asked.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        failed += record["failed"]
        sys.stdout.write(f"{record['passed']} passed, {record['failed']} failed, {record['seconds']} s: {each.name}\n")
        sys.stdout.flush()
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
