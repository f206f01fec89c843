"""The command line: each command on a tiny recipe, what it prints, how it exits. Ranks are threads
where they can.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from command_line import RECIPE, prepare, shoal
from shoal.core.plan import Plan
from shoal_tools.cli import main
from shoal_tools.commands import plan as plan_command
from shoal_tools.launch.lab import Lab
from shoal_tools.report.run_file import load

COMMANDS = (
    "agent",
    "bench",
    "cache",
    "check",
    "doctor",
    "features",
    "lab",
    "plan",
    "probe",
    "rendezvous",
    "report",
    "run",
    "simulate",
    "test",
    "train",
)
needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.mark.slow
def test_servers_serve_until_the_workers_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SERVERS", "1")
    command = [
        sys.executable,
        "-m",
        "shoal",
        "check",
        RECIPE,
        "--workers",
        "3",
        "--pin",
        "*=server",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks against one process" in squeezed(done.stdout)


@pytest.mark.slow
def test_workers_may_run_ahead_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SERVERS", "1")
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        RECIPE,
        "--workers",
        "3",
        "--staleness",
        "2",
        "--steps",
        "4",
        "--explain",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 steps of" in done.stdout
    assert "no other strategy serves it" in squeezed(done.stdout)
    assert re.search(r"rank 2\b.*ahead", squeezed(done.stdout))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_help_lists_every_command_on_one_line() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert sorted(main.commands) == sorted(COMMANDS)
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +[A-Z].*\.$", shown, re.MULTILINE), name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help.endswith((".", ")"))
            assert parameter.opts[0] in result.output


def test_steps_go_on_into_as_many_passes_as_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("train", RECIPE, "--steps", "100") == [0]
    assert "100 steps of" in capsys.readouterr().out


def test_train_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("train", RECIPE, "--epochs", "3") == [0]
    printed = capsys.readouterr().out
    assert "epoch 3: loss" in printed
    assert "36 steps" in printed
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 75  # type: ignore[index]


def test_train_says_at_its_end_what_codecs_save_and_lose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pin = "--pin", "*=replicate:direct+int8"
    assert shoal("train", RECIPE, "--steps", "3", *pin, ranks=2) == [0, 0]
    printed = squeezed(capsys.readouterr().out)
    assert re.search(r"codecs: 2 layers send \S+ MB a step in place of \S+ MB", printed)
    assert re.search(r"worst layer: \d \(replicate:direct\+int8\), one step off by \S+%", printed)
    assert "exact, without codecs: a step of" in printed


def test_train_on_two_ranks_shows_the_plan_and_compares_the_prediction(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    assert shoal(
        "train",
        RECIPE,
        "--steps",
        "6",
        "--pin",
        "2=factor",
        "--memory",
        "low",
        "--save-plan",
        path,
        ranks=2,
    ) == [
        0,
        0,
    ]
    printed = squeezed(capsys.readouterr().out)
    assert printed.count("plan for 2 ranks") == 1
    assert "6 steps" in printed
    assert "codecs" not in printed
    assert re.search(
        r"memory of this rank: parameters [\d.]+ MB, gradients [\d.]+ MB, optimizer state", printed
    )
    assert re.search(
        r"one process would hold: parameters ([\d.]+) MB, gradients \1 MB, optimizer state", printed
    )
    assert re.search(r"predicted step [\d.]+ ms: \d+% (under|over) the measured one", printed)
    assert Plan.load(path).choice("2").strategy == "factor"


def test_a_plan_made_without_a_network_is_saved_and_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    assert shoal(
        "plan", RECIPE, "--ranks", "3", "--rate", "200mbit", "--pin", "*=factor", "--save", path
    ) == [0]
    assert "plan for 3 ranks" in squeezed(capsys.readouterr().out)
    got = shoal("train", RECIPE, "--steps", "2", "--plan", path, ranks=3)
    assert got == [0, 0, 0], capsys.readouterr().err
    assert squeezed(capsys.readouterr().out).count(" factor ") == 2
    assert shoal("train", RECIPE, "--steps", "2", "--plan", path, ranks=2) == [2, 2]
    assert "another number of ranks" in capsys.readouterr().err


def test_servers_and_hosts_that_ranks_share_are_planned_for_without_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    imagined = ("plan", RECIPE, "--ranks", "4", "--rate", "10mbit")
    assert shoal(*imagined, "--servers", "2", "--pin", "2=server") == [0]
    assert " server:" in squeezed(capsys.readouterr().out)
    assert shoal(*imagined[:3], "1", "--servers", "1") == [0]
    assert shoal(*imagined, "--ranks-per-host", "2", "--pin", "2=sliced:hierarchical") == [0]
    assert "hierarchical" in squeezed(capsys.readouterr().out)


def test_a_placement_is_planned_saved_and_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, placed = tmp_path / "plan.json", ("--placement", "round-robin")
    assert shoal("plan", RECIPE, "--ranks", "2", "--pin", "*=sliced", *placed, "--save", path) == [
        0
    ]
    assert "placement round-robin" in squeezed(capsys.readouterr().out)
    assert Plan.load(path).placement == "round-robin"
    assert shoal("train", RECIPE, "--steps", "2", "--plan", path, ranks=2) == [0, 0]
    assert "placement round-robin" in squeezed(capsys.readouterr().out)
    assert shoal("train", RECIPE, "--plan", path, *placed) == [2]
    assert "both a plan and a placement" in capsys.readouterr().err


def test_check_passes_where_ranks_equal_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("check", RECIPE, "--steps", "3", ranks=2) == [0, 0]
    printed = squeezed(capsys.readouterr().out)
    worst = re.search(
        r"2 ranks against one process, 3 steps in float64: largest relative difference (\S+)",
        printed,
    )
    assert worst is not None and float(worst[1]) < 1e-10
    assert "0.weight" in printed


def test_check_follows_a_saved_plan_in_float64_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    assert shoal("plan", RECIPE, "--ranks", "2", "--strategy", "sliced", "--save", path) == [0]
    capsys.readouterr()
    got = shoal("check", RECIPE, "--steps", "2", "--plan", path, ranks=2)
    assert got == [0, 0], capsys.readouterr()
    assert "sliced" in capsys.readouterr().out.partition("largest")[0]


def test_check_converts_the_model_before_an_optimizer_sees_it(tmp_path: Path) -> None:
    """Some optimizers make their state at once, of their parameters' type."""
    recipe = tmp_path / "adagrad.py"
    recipe.write_text(
        Path(RECIPE).read_text()
        + """

def optimizer(params):
    made = torch.optim.Adagrad(params, lr=0.1)
    for p in made.param_groups[0]["params"]:
        assert p.dtype == made.state[p]["sum"].dtype == torch.float64
    return made
"""
    )
    assert shoal("check", recipe, "--steps", "2", ranks=2) == [0, 0]


def test_check_fails_where_they_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("check", RECIPE, "--steps", "3", "--pin", "2=replicate:nothing", ranks=2) == [1, 1]
    assert "not the same as one process" in capsys.readouterr().err


def test_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("probe", ranks=2) == [0, 0]
    printed = squeezed(capsys.readouterr().out)
    assert printed.count("link rate, each direction") == 1
    assert re.search(r"link rate, each direction │ [\d,]+ Mbit/s", printed)


@pytest.mark.slow
@pytest.mark.processes
def test_bench_against_ddp_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    trace = tmp_path / "trace.json"
    options = (
        "--against",
        "ddp",
        "--rounds",
        "2",
        "--steps",
        "2",
        "--json",
        str(path),
        "--trace",
        str(trace),
        "--report",
        str(tmp_path / "run.json"),
    )
    command = (sys.executable, "-m", "shoal", "bench", RECIPE, "-w", "2", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    progress = done.stderr.splitlines()
    benched = [line for line in progress if line.startswith("bench: ")]
    assert benched[0] == "bench: measuring and planning"
    assert benched[-1].startswith("bench: round 2 of 2: shoal ")
    begins = "bench: ", "shoal: "
    assert all(line.startswith(begins) for line in progress), "and nothing else"
    figures = json.loads(path.read_text())
    assert set(figures["median_s"]) == {"shoal", "ddp"}
    assert [len(times) for times in figures["rounds_s"].values()] == [2, 2]
    assert set(figures["memory_bytes"]) == {
        "parameters",
        "gradients",
        "optimizer_state",
        "buckets_peak",
    }
    assert (
        figures["memory_of_one_process_bytes"]["gradients"] == figures["memory_bytes"]["parameters"]
    )
    assert 0 < figures["floor_s"] <= figures["predicted_s"]
    ratio = figures["median_s"]["shoal"] / figures["floor_s"]
    assert f"measured {ratio:.2f} of it" in squeezed(done.stdout)
    assert set(figures["sent_bytes"]) == {"shoal", "ddp"}
    busy = [figures["processors_busy"][name] for name in ("shoal", "ddp")]
    assert all(0 <= share <= 1 for share in busy)
    told = "of rank 0's machine were busy" in squeezed(done.stdout)
    assert told == any(busy), "the kernel counts by 10 ms, which such steps may take less than"
    rows = json.loads(trace.read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert list(names.values()) == ["rank 0", "rank 1", "predicted, one step"]
    for pid, name in names.items():
        did = [(row["name"], row["ts"]) for row in rows if row["ph"] == "X" and row["pid"] == pid]
        times = 1 if "predicted" in name else 2
        for what in ("backward", "wait for gradients", "optimizer"):
            assert sum(each == what for each, _ in did) == times
        assert sum(each.startswith("forward") for each, _ in did) == times
        assert any(each.startswith("exchange") for each, _ in did)
        carried = [row for row in rows if row["ph"] == "C" and row["pid"] == pid]
        assert any(row["args"]["Mbit/s"] > 0 for row in carried), "a link is busy"
    begins = [
        min(row["ts"] for row in rows if row["name"] == "backward" and row["pid"] == pid)
        for pid in (0, 2)
    ]
    assert begins[0] == begins[1], "side by side"
    record = load(tmp_path / "run.json")
    assert [contender.ratio is None for contender in record.contenders] == [True, False]
    assert record.step_s == figures["median_s"]["shoal"]
    assert len(record.tracks) == 3 and record.explanation is not None
    ratio = figures["ratio_to_shoal"]["ddp"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert f"{ratio['median']:.2f}" in done.stdout


@pytest.mark.processes
def test_train_starts_ranks_that_say_what_was_chosen_and_no_more() -> None:
    command = (
        str(Path(sys.executable).parent / "shoal"),
        "train",
        RECIPE,
        "--ranks",
        "2",
        "--steps",
        "3",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    *stages, chosen = done.stderr.splitlines()
    assert re.fullmatch(r"shoal: 2 ranks, 2 layers: .*; predicted step .* ms", chosen)
    stage = r"shoal: (measuring the (model|links)|planning) … \d+\.\d s"
    assert stages and all(re.fullmatch(stage, line) for line in stages), "and nothing else"
    assert done.stdout.splitlines()[-1].startswith("3 steps of 8 rows in ")
    assert "[rank 0]" not in done.stdout + done.stderr, "rank 0 alone speaks"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trian", RECIPE), "Did you mean 'train'?"),
        (("train",), "RECIPE"),
        (("train", RECIPE.replace("recipe", "recipee")), "did you mean"),
        (("train", RECIPE, "--pin", "2"), "--pin': '2' is not LAYER=STRATEGY"),
        (("train", RECIPE, "--pin", "3=factor"), "such as 0, 2"),
        (("train", RECIPE, "--strategy", "fctor"), "did you mean 'factor'?"),
        (("train", RECIPE, "--placement", "robin"), "round-robin"),
        (("train", RECIPE, "--staleness", "\u00b2"), "'\u00b2' is not a number of steps"),
        (("train", RECIPE, "--local-steps", "0"), "'0' is not a number of steps above 0"),
        (("train", RECIPE, "--local-steps", "many"), 'nor "auto"'),
        (("train", RECIPE, "--outer", "adam"), "--outer"),
        (("train", RECIPE, "--outer", "bmuf"), "no local_steps"),
        (("train", RECIPE, "--islands"), "no local_steps"),
        (("train", RECIPE, "--warmup-steps", "-1"), "--warmup-steps': '-1' is not a number of"),
        (("train", RECIPE, "--check-every", "-1"), "'-1' is not a number of steps, 0 or more"),
        (("train", RECIPE, "--micro-batches", "0"), "'0' is not a number of micro-batches, 1 or"),
        (("train", RECIPE, "--pin", "2=fctor"), "did you mean 'factor'?"),
        (("train", RECIPE, "--plan", "no\0where.json"), "where.json cannot be read"),
        (("train", RECIPE, "--memory-limit", "nan"), "--memory-limit"),
        (("train", RECIPE, "--ranks", "10000000"), "--ranks"),
        (("plan", RECIPE, "--ranks", "10000000"), "--ranks"),
        (("plan", RECIPE, "--ranks", "2", "--cores-per-rank", "0"), "--cores-per-rank"),
        (("plan", RECIPE, "--ranks", "2", "--cores-per-rank", "nan"), "--cores-per-rank"),
        (("plan", RECIPE, "--ranks", "2", "--latency-us", "inf"), "inf is not a finite number"),
        (("plan", RECIPE, "--ranks", "2", "--latency-us", "-1"), "--latency-us"),
        (("plan", RECIPE, "--ranks", "2", "--rate", "\u00b2gbit"), "--rate 200mbit"),
        (("plan", RECIPE, "--ranks", "2", "--rate", "9" * 400 + "gbit"), "--rate 200mbit"),
        (("doctor", "--rate", "fast"), "--rate 200mbit"),
        (("doctor", "--port", "70000"), "--port"),
        (("lab", "--rate", "\u0663gbit", "--", "true"), "200mbit"),
        (("lab", "--hosts", "250", "--ranks-per-host", "1000", "--", "true"), "at most 1024 ranks"),
        (("train", RECIPE, "--staleness", "-1"), "'-1' is not a number of steps"),
        (("train", RECIPE, "--plan", "nowhere.json"), "nowhere.json cannot be read"),
        (("train", RECIPE, "--save-plan", "nowhere/plan.json"), "there is no folder nowhere"),
        (("train", RECIPE, "--workers", "0"), "--workers"),
        (("plan", RECIPE, "--ranks", "2", "--rate", "1gb"), "--rate 200mbit"),
        (("plan", RECIPE, "--ranks", "2", "--memory-limit", "9"), "keeps the limit of memory"),
        (("train", RECIPE, "--memory-limit", "0"), "--memory-limit"),
        (("train", RECIPE, "--save-plan", "plan.json"), "one process trains without a plan"),
        (("bench", RECIPE), "add --ranks 2"),
        (("bench", RECIPE, "--against", "dpd"), "plain, ddp, fsdp2"),
        (("bench", RECIPE, "--against", "exat"), "did you mean exact?"),
        (("bench", RECIPE, "--against", "ddp,ddp:fp15"), "did you mean ddp:fp16?"),
        (("bench", RECIPE, "--against", "ddp,plain,ddp"), "ddp is named twice"),
        (("bench", RECIPE, "--json", "nowhere/b.json"), "there is no folder nowhere"),
        (("lab",), "COMMAND"),
        (("trian", RECIPE), "Did you mean 'train'?"),
        (("lab", "--delay", "long", "--", "true"), "do this: write it so, or leave out --delay"),
        (("run", "--host", "a", "x.py"), "did you mean --hosts? Or write an option of the script"),
        (("run", "--epochs", "3", "--hosts", "a", "x.py"), "shoal run … script.py --epochs"),
        (("run", "--hosts", "a", "--ssh", "no-ssh", __file__), "do this: check --ssh"),
        (("run", "--hosts", "localhost", "."), "the script is a folder"),
        (("run", "--hosts-file", "/dev/null", "x.py"), "do this: name one; this machine is"),
        (("run", "--hosts", "localhost", "x.py"), "1 of 1 host cannot start"),
        (("agent", "--rendezvous", "h", "--epoch", "3", "x.py"), "shoal agent has no option"),
        (("agent", "--rendezvous", "h", "--min", "3", "--max", "2", "x"), "--min 3 --max 3"),
        (("train", RECIPE, "--plan", __file__ + "/x"), "the file that Plan.save wrote"),
        (("train", RECIPE, "--ranks", "2", "--master", "a,b"), "it is for: --launcher ssh"),
        (
            ("simulate", str(Path(__file__).parents[2] / "pyproject.toml")),
            "do this: give the recipe. shoal simulate takes a",
        ),
        (("report", "/no/file.json"), "write one: shoal train RECIPE --report"),
        (("doctor", "--peer", "a b"), "write --peer HOST, once for each"),
        (("lab", "--rate", "fast", "--", "true"), "200mbit"),
        (("lab", "--hosts", "0", "--", "true"), "--hosts"),
        (("lab", "--ranks-per-host", "0", "--", "true"), "--ranks-per-host"),
    ],
    ids=lambda value: " ".join(value[:3]).replace(RECIPE, "R") if isinstance(value, tuple) else "",
)
def test_mistakes_exit_with_2_and_a_message(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(*arguments) == [2]
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_of_several_ranks_only_the_first_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("train", RECIPE, "--pin", "3=factor", ranks=3) == [2, 2, 2]
    printed = capsys.readouterr().err
    assert printed.count("the pin '3' matches no layer") == 3
    assert printed.count("do this:") == 1


def test_all_frames_of_an_error_are_shown_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRACEBACK", "1")
    assert shoal("train", RECIPE, "--pin", "3=factor") == [2]
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "cli.py" in printed
    assert "\nshoal: the pin '3' matches no layer" in printed
    assert "do this:" in printed.splitlines()[-1], "the message comes last"


@pytest.mark.parametrize(("launched", "said"), [(False, "shoal: ended by Ctrl-C\n"), (True, "")])
def test_ctrl_c_is_told_once_and_by_the_launcher(
    launched: bool,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command.plan, "callback", interrupted)
    if launched:
        monkeypatch.setenv("SHOAL_JOB", "a job")
    assert shoal("plan", RECIPE) == [130]
    assert capsys.readouterr().err == said


def test_reasons_are_printed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    imagined = ("plan", RECIPE, "--ranks", "4", "--rate", "10mbit")
    assert shoal(*imagined) == [0]
    brief = capsys.readouterr().out
    assert shoal(*imagined, "--explain") == [0]
    full = capsys.readouterr().out
    assert "cannot: " in full and "cannot" not in brief
    assert max(map(len, (brief + full).splitlines())) <= 80


def test_an_error_in_the_recipe_shows_its_lines_and_none_of_shoals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    text = (
        Path(RECIPE)
        .read_text()
        .replace("    return nn.Sequential(", "    {}['width']\n    return nn.Sequential(")
    )
    path.write_text(text)
    at = text[: text.index("{}['width']")].count("\n") + 1
    assert shoal("train", path) == [1]
    printed = capsys.readouterr().err
    assert printed.startswith("shoal: the recipe failed\nTraceback")
    assert f'File "{path}", line {at}, in model' in printed
    assert printed.endswith("KeyError: 'width'\n")
    assert printed.count('File "') == 1


def test_lab_says_what_this_machine_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lab, "missing", lambda self: "it needs root, to make network namespaces")
    assert shoal("lab", "--", "true") == [2]
    assert "a lab cannot be built here: it needs root" in capsys.readouterr().err


@pytest.mark.lab
@needs_lab
def test_lab_passes_arguments_and_the_exit_code_on(capfd: pytest.CaptureFixture[str]) -> None:
    script = 'echo $RANK of $WORLD_SIZE: "$@"; exit $((RANK * 3))'
    assert shoal(
        "lab", "--hosts", "2", "--rate", "none", "--", "sh", "-c", script, "sh", "--rate", "x"
    ) == [3]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[h0] 0 of 2: --rate x",
        "[h1] 1 of 2: --rate x",
    ]
    assert shoal(
        "lab", "--hosts", "1", "--ranks-per-host", "2", "--", "sh", "-c", "exit $LOCAL_RANK"
    ) == [1]


@pytest.mark.lab
@needs_lab
@pytest.mark.parametrize(
    ("options", "pin"),
    [
        (("--ranks-per-host", "2"), "*=sliced:hierarchical"),
        pytest.param(("--servers", "1"), "*=server", marks=pytest.mark.slow),
    ],
    ids=["two ranks a host", "a server"],
)
@pytest.mark.slow
def test_ranks_of_a_lab_train_as_one_process(
    options: tuple[str, ...], pin: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check = (sys.executable, "-m", "shoal", "check", RECIPE, "--steps", "2", "--pin", pin)
    assert shoal("lab", "--hosts", "2", "--rate", "none", *options, "--", *check) == [0]
    printed = squeezed(capfd.readouterr().out)
    assert "the same" in printed and "not the same" not in printed
    assert pin.partition(":")[2] in printed


def test_options_behind_a_labs_command_are_the_commands() -> None:
    context = main.commands["lab"].make_context(
        "lab", ["--hosts", "3", "python", "train.py", "--rate", "0.1"]
    )
    assert (context.params["hosts"], context.params["rate"]) == (3, "1gbit")
    assert context.params["command"] == ("python", "train.py", "--rate", "0.1")


def recipe_with(tmp_path: Path, *, top: str = "", **bodies: str) -> Path:
    """The tiny recipe with other functions, by their bodies."""
    path = tmp_path / "changed.py"
    arguments = {"optimizer": "params", "accuracy": "output, target"}
    functions = [
        f"def {name}({arguments.get(name, '')}):\n    {body}\n" for name, body in bodies.items()
    ]
    path.write_text("\n\n".join([Path(RECIPE).read_text(), top, *functions]))
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": "return lambda output, target: 1.0"}, ("loss_fn returned no loss", "got: 1.0")),
        ({"loss": "return lambda output, target: output"}, ("not a scalar", ".mean()")),
        ({"model": "return nn.Linear(999, 3)"}, ("the model does not take the sample", "999")),
    ],
    ids=["loss of a float", "loss of many", "another width"],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_recipe_that_does_not_fit_together_is_told_alone_as_on_ranks(
    command: str,
    changed: dict[str, str],
    said: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shoal(command, recipe_with(tmp_path, **changed), "--steps", "1") == [2]
    printed = capsys.readouterr().err
    assert printed.startswith("shoal: ") and "Traceback" not in printed
    for words in said:
        assert words in printed


@pytest.mark.parametrize(
    "changed",
    [
        {"top": "import sys; sys.exit(0)"},
        {"top": "import argparse; argparse.ArgumentParser().parse_args(['--no'])"},
        {"data": "import sys; sys.exit()"},
        {"model": "raise SystemExit('no model')"},
        {"loss": "import sys; return lambda output, target: sys.exit(7)"},
    ],
    ids=["loaded", "arguments", "data", "model", "first step"],
)
def test_a_recipe_that_ends_the_process_is_named(
    changed: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_with(tmp_path, **changed)
    assert shoal("train", path, "--steps", "1") == [2]
    printed = capsys.readouterr().err
    assert "the recipe ended the process" in printed
    assert f"where: {path}, line " in printed and "sys.exit(" in printed


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": 1, "ranks": ' + "9" * 5000 + "}",
        "\0",
        '{"format": 1, "ranks": NaN}',
        "",
        "7",
        '"plan"',
    ],
    ids=["depth", "huge", "NUL", "NaN", "empty", "number", "text"],
)
def test_a_plan_file_of_any_text_is_told_as_such(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert shoal("train", RECIPE, "--plan", path) == [2]
    printed = capsys.readouterr().err
    assert f"shoal: {path} is not" in printed
    assert "recipe" not in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 10**12),
        ("lanes", 10**9),
        ("lanes", 0),
        ("bucket_bytes", 10**30),
        ("micro_batches", 10**9),
        ("chunks", 10**9),
        ("late", -1),
        ("predicted_s", 1e308),
        ("predicted_s", -1.0),
        ("staleness", 10**30),
    ],
)
def test_a_plan_with_numbers_out_of_bounds_is_refused(
    field: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert shoal("plan", RECIPE, "--ranks", "2", "--save", path) == [0]
    data = json.loads(path.read_text())
    assert field in data
    path.write_text(json.dumps({**data, field: value}))
    assert shoal("train", RECIPE, "--plan", path) == [2]
    assert f"{path}: {field}" in squeezed(capsys.readouterr().err)


def test_help_lists_every_command_in_a_group_with_its_whole_sentence() -> None:
    said = CliRunner().invoke(main, ["--help"]).output
    assert "..." not in said.partition("\n")[2]
    titles = [line for line in said.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        "Options:",
        "Train:",
        "Hosts that come and go:",
        "Plan and compare:",
        "Look at hosts and links:",
    ]
    told = " ".join(said.split())
    for name, command in main.commands.items():
        sentence = " ".join((command.help or "").split("\n\n")[0].split())
        assert f"{name} {sentence}" in told
