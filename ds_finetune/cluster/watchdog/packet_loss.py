"""Packets that the TCP connections of this process had to send again, by the address at the other end.

These are the connections of the watchdog, of gloo, and of NCCL where it uses sockets.
"""

import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_INFO_BYTES = 228
_RESENT_AT, _SENT_AT, _NEEDLESS_AT = 100, 156, 216
"""Offsets in struct tcp_info (Linux 5.4, include/uapi/linux/tcp.h): tcpi_total_retrans, tcpi_data_segs_out,
tcpi_dsack_dups.
"""
_LEAST_RESENT, _LEAST_RATIO = 5, 0.05
"""A connection that loses fewer packets does not hold up a collective for as long as the watchdog's limit."""


@dataclass(frozen=True)
class PacketCounts:
    """Data packets sent to each address, and those of them that were sent again because they were lost."""

    sent: Mapping[str, int]
    resent: Mapping[str, int]

    def losses_since(self, before: "PacketCounts") -> tuple[str, ...]:
        """One text for each address to which many packets were lost since `before`."""
        texts = []
        for address, total in self.resent.items():
            resent = total - before.resent.get(address, 0)
            sent = self.sent[address] - before.sent.get(address, 0)
            if resent >= max(_LEAST_RESENT, _LEAST_RATIO * sent):
                texts.append(f"to {address}: {resent:,} of {sent:,} packets sent again ({resent / max(sent, 1):.0%})")
        return tuple(texts)


NO_PACKETS = PacketCounts({}, {})


def packet_counts() -> PacketCounts:
    """The packets of the connections that are open now; none where the kernel does not tell."""
    sent, resent = Counter[str](), Counter[str]()
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        # A connection may be closed meanwhile, and most files are none.
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
                address = str(connection.getpeername()[0]).removeprefix("::ffff:")
            total, out, needless = (struct.unpack_from("I", info, at)[0] for at in (_RESENT_AT, _SENT_AT, _NEEDLESS_AT))
            sent[address] += out
            resent[address] += max(total - needless, 0)
    return PacketCounts(sent, resent)
