"""Checks of folders, files and disk space: pure functions of what the hosts answered."""

from collections.abc import Iterator, Mapping, Sequence

from ds_finetune.cluster.doctor.host_details import HostDetails
from ds_finetune.cluster.hosts.check_result import Check
from ds_finetune.config.units import GIB


def folder_checks(
    name: str, path: str, visible: Mapping[str, Sequence[str]], *, node_local: bool | None = None
) -> Iterator[Check]:
    """Check which hosts share a folder; `visible` has, for each host, the hosts whose marker file it sees there.

    `node_local` is checkpoint.node_local, None for a folder that this key does not concern.
    """
    for host in (host for host, others in visible.items() if host not in others):
        found = f"{name} {path} is not writable there"
        yield Check("folders", host, "fail", found, "change the permissions, or name another folder")
    writable = {host: others for host, others in visible.items() if host in others}
    if len(writable) < 2:
        return
    if all(set(others) == set(writable) for others in writable.values()):
        is_wrong = node_local is True
        found = f"{name} {path} is shared by all hosts" + (", and checkpoint.node_local is true" if is_wrong else "")
        hint = "set checkpoint.node_local false" if is_wrong else ""
        yield Check("folders", "", "warn" if is_wrong else "ok", found, hint)
    elif all(list(others) == [host] for host, others in writable.items()):
        is_wrong = node_local is False
        found = f"{name} {path} is another on each host" + (", and checkpoint.node_local is false" if is_wrong else "")
        hint = "set checkpoint.node_local true, or name a folder that all hosts share" if is_wrong else ""
        yield Check("folders", "", "fail" if is_wrong else "ok", found, hint)
    else:
        most = max(writable.values(), key=len)
        for host in (host for host in writable if host not in most):
            found = f"{name} {path} is not the one of {', '.join(most)}"
            hint = f"mount on {host} what {most[0]} has there"
            yield Check("folders", host, "ok" if node_local is None else "fail", found, hint)


def file_checks(here: HostDetails, hosts: Mapping[str, HostDetails]) -> Iterator[Check]:
    """Model folder and data files of each host, compared with those of the machine that runs `doctor`."""
    for path, mine in here.files.items():
        absent = [host for host, details in hosts.items() if details.files.get(path) is None]
        other = [host for host, details in hosts.items() if host not in absent and details.files[path] != mine]
        for host in absent if mine is not None else ():
            hint = "copy it to the same path, or use a folder that all hosts share"
            yield Check("files", host, "fail", f"{path} does not exist there", hint)
        for host in other if mine is not None else ():
            hint = "copy it again, or use a folder that all hosts share"
            yield Check("files", host, "fail", f"{path} differs from the one here (names or sizes)", hint)
        if not absent and not other and len(hosts) > 1:
            yield Check("files", "", "ok", f"{path} is the same on all hosts")


def disk_checks(hosts: Mapping[str, HostDetails], output: str, needed: Mapping[str, int]) -> Iterator[Check]:
    """Check that each host may write to `output` and has the space; `needed` has bytes by host."""
    for host, details in hosts.items():
        folder, size = details.folders[output], needed.get(host, 0)
        room = folder.free_bytes + folder.held_bytes
        found = f"{output} needs {size / GIB:,.2f} GiB at most, {room / GIB:,.1f} GiB free"
        if not folder.is_writable:
            found = f"{output} cannot be written in {folder.existing}"
            yield Check("disk", host, "fail", found, "change the permissions, or name another output_dir")
        elif size > room:
            hint = "free some space, name another output_dir, or lower checkpoint.keep"
            yield Check("disk", host, "fail", found, hint)
        else:
            yield Check("disk", host, "ok", found)
