"""Checks of the network of this host: buffers of connections, and cards for RDMA."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from dynamo.operations.doctor.checks import Finding

MIN_BUFFER_BYTES = 16 << 20
"""10 Gbit/s with 10 ms to the other host fill 12 MB."""
SYSCTL = Path("/proc/sys")
CARDS = Path("/sys/class/infiniband")
BUFFERS = ("net/core/rmem_max", "net/core/wmem_max", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem")


def check_network(sysctl: Path = SYSCTL, cards: Path = CARDS) -> Iterator[Finding]:
    """Yield a finding for each limit of buffers, and those of RDMA."""
    for name in BUFFERS:
        key = name.replace("/", ".")
        try:
            words = (sysctl / name).read_text().split()
        except OSError:
            yield Finding(key, "warn", "cannot be read", "look at it on the host itself")
            continue
        largest = int(words[-1])
        if largest >= MIN_BUFFER_BYTES:
            yield Finding(key, "ok", f"at most {largest} bytes")
            continue
        value = " ".join([*words[:-1], str(MIN_BUFFER_BYTES)])
        hint = f"for KV blocks between distant hosts: sysctl -w {key}='{value}'"
        yield Finding(key, "warn", f"at most {largest} bytes", hint)
    yield from _check_rdma(cards)


def _check_rdma(cards: Path) -> Iterator[Finding]:
    ports = sorted(cards.glob("*/ports/*"))
    if not ports:
        hint = "KV blocks move by TCP; with a card: load its driver, and look at ibv_devinfo"
        yield Finding("rdma", "ok", "no card for RDMA", hint)
        return
    for port in ports:
        name = f"{port.parent.parent.name} port {port.name}"
        state = (port / "state").read_text().strip()
        text = f"{name}: {state}, {(port / 'rate').read_text().strip()}"
        hint = "" if "ACTIVE" in state else "look at the cable, the switch, and ibstat"
        yield Finding("rdma", "warn" if hint else "ok", text, hint)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        hint = "ulimit -l unlimited: cards need pinned memory"
        yield Finding("locked memory", "warn", f"at most {soft} bytes", hint)
