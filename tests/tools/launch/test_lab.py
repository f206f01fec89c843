"""The lab: hosts that reach each other at the stated rate, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.contracts.launcher import Job
from shoal.core.errors import LabError
from shoal_tools.launch import lab as lab_module
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.namespaces import NAMES, SETTINGS, attempt

needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)

# Host 0 listens, host 1 sends it 30 MB; host 0 writes down the rate in bit/s after the first 2 MB,
# which fill buffers.
TRANSFER = """
import os, pathlib, socket, sys, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 7000)) as server:
        peer, _ = server.accept()
        count = sum(len(peer.recv(1 << 16)) for _ in range(1))
        while count < 2_000_000: count += len(peer.recv(1 << 16))
        began, first = time.monotonic(), count
        while data := peer.recv(1 << 16): count += len(data)
        pathlib.Path(sys.argv[1]).write_text(str((count - first) * 8 / (time.monotonic() - began)))
else:
    for _ in range(200):
        try: link = socket.create_connection(("10.0.0.1", 7000))
        except ConnectionRefusedError: time.sleep(0.02)
        else: break
    link.sendall(bytes(30_000_000))
"""

# Plain PyTorch, nothing of Shoal's: the sum over ranks; then rank 0 is killed, and the store still
# answers.
PLAIN_TORCH = """
import os, signal, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), 1.0 + dist.get_rank())
dist.all_reduce(x)
assert x.eq(3).all(), x
if dist.get_rank() == 0: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set("verdict", "rank 0 was lost")
print(store.get("verdict").decode())
os._exit(0)
"""

# Both hosts of a lab greet each other with the lab's own word, on the same addresses as the lab
# beside it.
GREET = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 7000)) as server:
        peer, _ = server.accept()
        time.sleep(0.3)
        peer.sendall(sys.argv[1].encode())
else:
    for _ in range(200):
        try: link = socket.create_connection(("h0", 7000))
        except ConnectionRefusedError: time.sleep(0.02)
        else: break
    sys.exit(link.recv(100) != sys.argv[1].encode())
"""


# Both ends of a connection say how TCP finds its pace.
CONGESTION = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 7000)) as server: link, _ = server.accept()
else:
    for _ in range(200):
        try: link = socket.create_connection(("h0", 7000))
        except ConnectionRefusedError: time.sleep(0.02)
        else: break
print(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""

# Rank 0 greets rank 1, its neighbour on h0: the counters say which interface carried it.
NEIGHBOURS = """
import os, pathlib, socket, sys, time
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SHOAL_HOST")
print(*(os.environ[name] for name in names))
devices = pathlib.Path("/proc/net/dev")
sent = lambda device: int(devices.read_text().partition(device + ":")[2].split()[8])
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 7000)) as server:
        peer, _ = server.accept()
        before = sent("lo"), sent("eth0")
        peer.sendall(bytes(5_000_000))
        peer.recv(1)
        sys.exit(not (sent("lo") - before[0] > 5_000_000 and sent("eth0") - before[1] < 100_000))
elif os.environ["RANK"] == "1":
    for _ in range(200):
        try: link = socket.create_connection(("10.0.0.1", 7000))
        except ConnectionRefusedError: time.sleep(0.02)
        else: break
    count = 0
    while count < 5_000_000: count += len(link.recv(1 << 16))
    link.sendall(b"!")
"""


def own_namespaces() -> list[str]:
    return [path.name for path in NAMES.glob(f"shoal-{os.getpid()}-*")]


@pytest.mark.lab
@needs_lab
def test_links_hold_their_rate(tmp_path: Path) -> None:
    result = Lab(hosts=2, rate="200mbit").launch(
        Job((sys.executable, "-c", TRANSFER, str(tmp_path / "rate")), 2)
    )
    assert result.exit_code == 0
    assert 0.85 <= float((tmp_path / "rate").read_text()) / 200e6 <= 1.02


@pytest.mark.lab
@needs_lab
def test_unshaped_links_are_faster(tmp_path: Path) -> None:
    Lab(hosts=2, rate="none").launch(
        Job((sys.executable, "-c", TRANSFER, str(tmp_path / "rate")), 2)
    )
    assert float((tmp_path / "rate").read_text()) > 400e6


@pytest.mark.lab
@needs_lab
def test_plain_torch_meets_in_a_store_that_outlives_rank_0(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = Lab(hosts=2).launch(Job((sys.executable, "-c", PLAIN_TORCH), 2))
    printed = capfd.readouterr()
    assert (result.exit_codes, result.first_failure) == ((137, 0), 0)
    assert printed.out == "[h1] rank 0 was lost\n"
    assert "h0 ended first (killed by SIGKILL)" in printed.err
    assert "hostname of the client socket" not in printed.err


@pytest.mark.lab
@needs_lab
def test_two_labs_stand_side_by_side() -> None:
    with ThreadPoolExecutor(2) as threads:
        jobs = [Job((sys.executable, "-c", GREET, word), 2) for word in ("here", "there")]
        results = list(threads.map(lambda job: Lab(hosts=2).launch(job), jobs))
    assert [result.exit_codes for result in results] == [(0, 0), (0, 0)]
    assert own_namespaces() == []


@pytest.mark.lab
@needs_lab
def test_ranks_of_a_host_share_its_namespace_and_talk_over_its_loopback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = Lab(hosts=2, ranks_per_host=2).launch(Job((sys.executable, "-c", NEIGHBOURS), 4))
    assert result.exit_codes == (0, 0, 0, 0)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[h0.0] 0 0 2 4 h0",
        "[h0.1] 1 1 2 4 h0",
        "[h1.0] 2 0 2 4 h1",
        "[h1.1] 3 1 2 4 h1",
    ]


@pytest.mark.lab
@needs_lab
def test_it_stays_up_between_launches_inside_with() -> None:
    with Lab(hosts=2) as lab:
        assert sorted(own_namespaces()) == sorted(lab.namespaces)
        assert lab.launch(Job(("true",), 2)).exit_code == 0
        assert lab.launch(Job(("sh", "-c", "exit $RANK"), 2, grace_s=0.1)).exit_codes == (0, 1)
        assert sorted(own_namespaces()) == sorted(lab.namespaces)
    assert own_namespaces() == []


@pytest.mark.lab
@needs_lab
def test_a_launcher_that_is_killed_leaves_no_namespace() -> None:
    script = "from shoal_tools.cli import main; main()"
    command = (sys.executable, "-c", script, "lab", "--hosts", "2", "--", "sleep", "61")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as lab:
        names = [f"shoal-{lab.pid}-0-{last}" for last in ("h0", "h1", "switch")]
        until(lambda: all(map(inside_of, names[:2])))
        ranks = inside_of(names[0]) + inside_of(names[1])
        lab.kill()
    until(lambda: not any((NAMES / name).exists() for name in names))
    until(lambda: not any((SETTINGS / name).exists() for name in names))
    assert ranks
    until(lambda: not any(Path("/proc", pid).exists() for pid in ranks))


def inside_of(namespace: str) -> list[str]:
    """Return the processes in a namespace."""
    command = ("ip", "netns", "pids", namespace)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@needs_lab
def test_it_touches_nothing_of_the_machine_and_reaches_nothing_outside(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = set(os.listdir("/sys/class/net"))
    with Lab(hosts=1) as lab:
        assert set(os.listdir("/sys/class/net")) == before
        lab.launch(Job(("sh", "-c", "ip -brief address; ip route"), 1))
    printed = capfd.readouterr().out
    assert "10.0.0.1/24" in printed
    assert "default" not in printed


@pytest.mark.lab
@needs_lab
def test_hosts_have_linux_default_congestion_control_or_the_one_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    machine = setting.read_text()
    job = Job((sys.executable, "-c", CONGESTION), 2)
    for options, expected in (({}, "cubic"), ({"congestion": "reno"}, "reno")):
        assert Lab(hosts=2, **options).launch(job).exit_code == 0
        assert sorted(capfd.readouterr().out.split()) == ["[h0]", "[h1]", expected, expected]
    with pytest.raises(LabError, match=r"no congestion control 'cubid'(.|\n)*cubic"):
        Lab(hosts=2, congestion="cubid").launch(job)
    assert own_namespaces() == []
    assert setting.read_text() == machine


@pytest.mark.lab
@needs_lab
def test_a_lab_that_fails_half_built_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Lab, "_tbf", lambda self: ("tbf", "rate", "1gbit", "burst", "0kb", "latency", "50ms")
    )
    monkeypatch.setattr(Lab, "_check_kernel", lambda self: None)
    with pytest.raises(LabError, match="cannot be built"):
        Lab(hosts=2).launch(Job(("true",), 2))
    assert own_namespaces() == []


@pytest.mark.lab
@needs_lab
def test_a_kernel_without_netem_says_so_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_netem(*command: str) -> str:
        return "Specified qdisc kind is unknown." if "netem" in command else attempt(*command)

    monkeypatch.setattr(lab_module, "attempt", no_netem)
    monkeypatch.setattr(lab_module, "claim", lambda last: pytest.fail("it began to build"))
    with pytest.raises(LabError, match="netem"):
        Lab(hosts=2, delay="5ms").launch(Job(("true",), 2))


@pytest.mark.parametrize(
    ("options", "named_in_error"),
    [
        ({"hosts": 0}, "hosts=0"),
        ({"hosts": 1000}, "1 to 250"),
        ({"ranks_per_host": 0}, "ranks_per_host=0"),
        ({"rate": "1 gigabit"}, "200mbit"),
        ({"rate": "100"}, "200mbit"),
        ({"rate": "0mbit"}, "200mbit"),
        ({"rate": "1gbit", "delay": "5"}, "5ms"),
        ({"burst": "1gbit"}, "128kb"),
        ({"queue": "50"}, "5ms"),
    ],
)
def test_impossible_options_are_refused_at_construction(
    options: dict[str, object], named_in_error: str
) -> None:
    with pytest.raises(LabError, match=named_in_error):
        Lab(**options)  # type: ignore[arg-type]


def test_ranks_and_hosts_must_agree() -> None:
    with pytest.raises(LabError, match="3 ranks"):
        Lab(hosts=2).launch(Job(("true",), 3))
    with pytest.raises(LabError, match="2 hosts × 2 = 4 ranks"):
        Lab(hosts=2, ranks_per_host=2).launch(Job(("true",), 2))


def test_missing_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (Lab().missing() or "")
    monkeypatch.setenv("PATH", "")
    assert "ip, tc" in (Lab().missing() or "")
