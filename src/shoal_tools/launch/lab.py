"""A cluster on one machine: hosts are network namespaces, links have the rates of real ones.

      host h0              host h1          …   a namespace each, shoal-<launcher's pid>-<n>-h0 …
   eth0 10.0.0.1        eth0 10.0.0.2
      │ tbf                │ tbf                1  host -> switch, shaped
      │ tbf                │ tbf                2  switch -> host, shaped: many senders share the
   ┌──┴────────────────────┴─────────┐             receiver's link
   │ bridge   10.0.0.254             │          3  the switch's namespace, where the rendezvous
   └─────────────────────────────────┘             store listens: it lives in the launcher, so it
                                                   outlives every rank

Why here: Shoal's decisions depend on the network, and you must be able to see them without
owning four machines. Nothing touches the machine's own network, so labs stand side by side with the
same addresses. Hosts share processors, disk and host name ($SHOAL_HOST tells them apart). They do
not see the outside world. With `cores` each rank has a fixed part of the processors (quota.py).

Cost: about 30 ms a host to build. Root, Linux, iproute2.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import ClassVar, final

from shoal.comm.rendezvous import agreed, new_store, token_of, variables
from shoal.contracts.launcher import TOKEN, Job, Launcher, Result
from shoal.core.cores import CORES
from shoal.core.errors import LabError
from shoal_tools.launch import quota
from shoal_tools.launch.namespaces import (
    Guard,
    attempt,
    claim,
    execute,
    inside,
    name_hosts,
    sweep,
    take_down,
)
from shoal_tools.launch.processes import Command, Interrupts, check, environment, missing_tools, run

INTERFACE = "eth0"  # name of every host's interface
SWITCH_ADDRESS = "10.0.0.254"
NETWORK = "10.0.0.0/24"
MAX_HOSTS = 250  # the hosts of one /24 network
QUEUE = "50ms"
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
UNSHAPED = (None, "none", "unshaped")
_TIME = (r"[0-9]+(\.[0-9]+)?(us|ms|s)", "a time such as 500us or 5ms")
SYNTAX = {
    "rate": (r"[0-9]+(\.[0-9]+)?[kmg]bit", "a rate such as 200mbit, 1gbit or 2.5gbit, or none"),
    "burst": (r"[0-9]+kb", "a size such as 128kb"),
    "delay": _TIME,
    "queue": _TIME,
}


@final
@dataclass(eq=False)
class Lab(Launcher):
    """Hosts as network namespaces with shaped links, `ranks_per_host` ranks on each.

    `launch` builds the lab and takes it down again. Inside `with Lab(...) as lab:` it stays up
    between launches.

    Arguments:
        hosts: how many.
        rate: of each link in each direction, as `tc` writes it (1gbit, 200mbit); None or "none" for
            no limit.
        delay: added on the way from any host to any other (5ms); needs a kernel with netem.
        burst: bytes that a link lets pass at once. 32kb starves a 1gbit link. After a pause, one
            burst passes for free.
        ranks_per_host: number of ranks that share a host and its link. Their messages to each other
            stay on its loopback.
        congestion: how TCP finds its pace from host to host, whatever the machine's own way is:
            Linux's default, cubic; or bbr, reno …, as the kernel has them.
        queue: how long a packet may wait at a link before it is dropped. TCP fills the queue, so
            that every packet waits as long, even acknowledgements of the other direction. A switch
            with shallow buffers or a fair queue (fq_codel) has some milliseconds.
        cores: each rank may take so many cores' worth of processor time, also while others leave
            theirs. One number, or one for the ranks of each host. None for no limit.

    Raises: LabError for options that no lab can have.

    Example (root):
        >>> Lab(hosts=2, rate="200mbit").launch(Job(("true",), ranks=2)).exit_code
        0
    """

    name: ClassVar[str] = "lab"

    hosts: int = 2
    rate: str | None = "1gbit"
    delay: str | None = None
    burst: str = "128kb"
    ranks_per_host: int = 1
    congestion: str = "cubic"
    queue: str = QUEUE
    cores: float | Sequence[float] | None = None
    # namespaces of the hosts in order, then of the switch; empty while it is down
    namespaces: tuple[str, ...] = field(default=(), init=False)
    _guard: Guard | None = field(default=None, init=False, repr=False)  # while it is up
    # control groups of the ranks, while it is up and they have quotas
    _groups: list[Path] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise LabError(
                f"a lab has 1 to {MAX_HOSTS} hosts",
                got=f"hosts={self.hosts}",
                do="ask for another number",
            )
        if self.ranks_per_host < 1:
            raise LabError(
                "every host of a lab has at least one rank",
                got=f"ranks_per_host={self.ranks_per_host}",
                do="ask for another number",
            )
        self._check_cores()
        self.rate = None if self.rate in UNSHAPED else self.rate
        for option, value in (
            ("rate", self.rate),
            ("burst", self.burst),
            ("delay", self.delay),
            ("queue", self.queue),
        ):
            pattern, expected = SYNTAX[option]
            if value is not None and (
                not re.fullmatch(pattern, value) or float(re.split("[a-z]", value)[0]) == 0
            ):
                raise LabError(
                    f"a lab cannot have this {option}",
                    got=repr(value),
                    expected=expected,
                    do=f"write it so, or leave out --{option}",
                )

    def missing(self) -> str | None:
        """Say why this machine cannot have a lab; None if it can."""
        if lacks := missing_tools("ip", "tc", "unshare", "setpriv"):
            return f"{lacks} (iproute2 and util-linux have the tools)"
        if os.geteuid() != 0:
            return "it needs root, to make network namespaces"
        if complaint := attempt("unshare", "--net", "--mount", "true"):
            return f"this machine or container does not let root make namespaces: {complaint}"
        return None

    def launch(self, job: Job) -> Result:
        """Run the job to its end, `ranks_per_host` ranks on each host.

        Raises: LabError where the lab cannot be built, UsageError for a job that cannot start.
            KeyboardInterrupt after
        Ctrl-C, when nothing is left; a SIGTERM ends this process in the same way, after cleaning
        up.
        """
        check(job)
        if job.master:
            raise LabError("a lab is on this machine, and takes no master", got=job.master)
        if job.ranks != self.hosts * self.ranks_per_host or (
            job.ranks_per_host not in (None, self.ranks_per_host)
        ):
            raise LabError(
                "a lab runs as many ranks on every host",
                got=f"{job.ranks} ranks",
                expected=f"{self.hosts} hosts × {self.ranks_per_host} = "
                f"{self.hosts * self.ranks_per_host} ranks",
                do="start it as: shoal lab --hosts N -- COMMAND",
            )
        with Interrupts() as interrupts, nullcontext() if self.namespaces else self:
            store = inside(self.namespaces[-1], partial(new_store, SWITCH_ADDRESS))
            token = token_of(job)
            commands = [self._command(job, rank, store.port, token) for rank in range(job.ranks)]
            return run(commands, job.grace_s, interrupts, partial(agreed, store, token))

    def __enter__(self) -> Lab:
        if reason := self.missing():
            raise LabError("a lab cannot be built here", got=reason)
        self._check_kernel()
        sweep()
        quota.sweep()
        prefix = claim("switch")
        self.namespaces = (*(f"{prefix}-h{host}" for host in range(self.hosts)), f"{prefix}-switch")
        self._guard = Guard(self.namespaces)
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        names, self.namespaces = self.namespaces, ()
        take_down(names)
        if self._guard is not None:
            self._guard.release()
        quota.remove(self._groups)
        self._guard, self._groups = None, []

    def _command(self, job: Job, rank: int, port: int, token: str) -> Command:
        host, local_rank = divmod(rank, self.ranks_per_host)
        label = f"h{host}" if self.ranks_per_host == 1 else f"h{host}.{local_rank}"
        meeting = variables(SWITCH_ADDRESS, port, rank, job.ranks, local_rank, self.ranks_per_host)
        cores = self._cores_of(host)
        own = {} if cores is None else {CORES: f"{cores:g}"}
        variables_here = environment(
            job,
            GLOO_SOCKET_IFNAME=INTERFACE,
            SHOAL_HOST=f"h{host}",
            SHOAL_CACHE=os.environ.get(
                "SHOAL_CACHE", "off"
            ),  # labs differ, and hosts' names do not
            **meeting,
            **own,
            **{TOKEN: token},
        )
        command: tuple[str, ...] = ("ip", "netns", "exec", self.namespaces[host], *job.command)
        if cores is not None:
            command = quota.entering(self._groups[rank], command)
        return Command(command, variables_here, label)

    def _cores_of(self, host: int) -> float | None:
        """Return how many cores each rank of a host has, if it has some by a quota."""
        return self.cores[host] if isinstance(self.cores, Sequence) else self.cores

    def _check_cores(self) -> None:
        given = self.cores if isinstance(self.cores, Sequence) else [self.cores] * self.hosts
        if len(given) != self.hosts:
            raise LabError(
                "the number of cores is one for all hosts, or one for each",
                got=f"{len(given)} numbers",
                expected=f"1 or {self.hosts}",
            )
        for cores in given:
            if cores is not None and not quota.LEAST_CORES <= cores < math.inf:
                raise LabError(
                    "a rank of a lab has some part of a core, or several",
                    got=f"cores={cores}",
                    expected=f"at least {quota.LEAST_CORES:g}",
                )

    def _check_kernel(self) -> None:
        """Try each queue on a short-lived loopback device: a kernel without one says so here."""
        for queue in (self._tbf(), self._netem()):
            if queue and (
                complaint := attempt(
                    "unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *queue
                )
            ):
                option = "delay" if queue[0] == "netem" else "rate"
                raise LabError(
                    f"this kernel cannot shape links by {option}: it lacks tc's {queue[0]}",
                    got=complaint,
                    do=f"leave out the {option}, or load the module: modprobe sch_{queue[0]}",
                )

    def _tbf(self) -> tuple[str, ...]:
        return (
            ("tbf", "rate", self.rate, "burst", self.burst, "latency", self.queue)
            if self.rate
            else ()
        )

    def _netem(self) -> tuple[str, ...]:
        return ("netem", "delay", self.delay, "limit", "10000") if self.delay else ()

    def _build(self) -> None:
        *hosts, switch = self.namespaces
        addresses = {f"h{host}": f"10.0.0.{host + 1}" for host in range(self.hosts)} | {
            "switch": SWITCH_ADDRESS
        }
        for namespace in hosts:
            execute("ip", "netns", "add", namespace)
        for namespace in self.namespaces:
            name_hosts(namespace, addresses)
            _ip(namespace, "link set lo up")
        _ip(switch, "link add bridge type bridge")
        _ip(switch, f"address add {SWITCH_ADDRESS}/24 dev bridge")
        _ip(switch, "link set bridge up")
        for host, port in zip(hosts, addresses, strict=False):
            _ip(host, f"link add {INTERFACE} type veth peer name {port} netns {switch}")
            _ip(host, f"address add {addresses[port]}/24 dev {INTERFACE}")
            _ip(host, f"link set {INTERFACE} up")
            self._set_congestion(host, addresses[port])
            _ip(switch, f"link set {port} master bridge up")
            self._shape(host, INTERFACE, delayed=True)
            self._shape(switch, port, delayed=False)
        for (number, host), local_rank in product(enumerate(hosts), range(self.ranks_per_host)):
            cores = self._cores_of(number)
            if cores is not None:
                self._groups.append(quota.make(f"{host}.{local_rank}", cores))

    def _set_congestion(self, host: str, address: str) -> None:
        """Set it by the route, because a namespace may not set every sysctl."""
        route = f"{NETWORK} dev {INTERFACE} src {address} congctl {self.congestion}"
        if complaint := attempt("ip", "-n", host, "route", "replace", *route.split()):
            raise LabError(
                f"this kernel has no congestion control {self.congestion!r}",
                got=complaint,
                do=f"use one of: {AVAILABLE.read_text().strip()}; or load its module: modprobe "
                f"tcp_{self.congestion}",
            )

    def _shape(self, namespace: str, device: str, delayed: bool) -> None:
        """Put the queues on one end of a link: rates on both ends, the delay on the host's only."""
        queues = [queue for queue in (self._netem() if delayed else (), self._tbf()) if queue]
        for place, queue in zip(
            (("root", "handle", "1:"), ("parent", "1:1", "handle", "2:")), queues, strict=False
        ):
            execute("tc", "-n", namespace, "qdisc", "add", "dev", device, *place, *queue)


def _ip(namespace: str, command: str) -> None:
    execute("ip", "-n", namespace, *command.split())
