"""What this host reports about itself."""

import os
import socket

from ds_finetune.system.info import free_port, gather_host_info, interface_towards


def test_this_host() -> None:
    info = gather_host_info()
    assert "127.0.0.1" in info.interfaces["lo"]
    assert info.versions["torch"].startswith("2.")
    assert 0 < info.port < 65536
    assert info.port_holder is None
    assert interface_towards("127.0.0.1") == "lo"


def test_a_port_that_is_taken_has_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        info = gather_host_info(port)
        assert info.port == 0
        assert info.port_holder is not None
        assert info.port_holder.startswith(f"process {os.getpid()}, ")
    assert gather_host_info(port).port == port
    assert 0 < free_port() < 65536
