"""Many ranks: what a launcher says, what is reduced when, equal curves, and how a run ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import convnet
import mlp
import numpy as np
import pytest
from rank_program import step_program
from rank_runs import WORKER, check_killed
from rank_worker import CASES, RANKS, WIDE, WIDTHS

from onnx_fuse.cuda.launch import bind
from onnx_fuse.distributed import buckets, launch, nccl
from onnx_fuse.distributed.environment import Place, place
from onnx_fuse.distributed.watch import Sign, hang
from onnx_fuse.distributed.world import pieces
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ops.collective import COLLECTIVES
from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.recompute import Lifetimes
from onnx_fuse.program.problem import CHIPS, Collective
from onnx_fuse.report import trace
from onnx_fuse.runtime import timeline
from onnx_fuse.runtime.plan import plan
from onnx_fuse.runtime.schedule import by_dependency, sequential
from onnx_fuse.runtime.timeline import Communication, Exchange, Timeline
from onnx_fuse.training.backends import gpu_of
from onnx_fuse.training.ranks import GRADIENTS, Measure, counted

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0"}
NUMBERS = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in NUMBERS.items()}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (TORCHRUN, Place(3, 8, 1, "n0", 29500)),
        (TORCHRUN | {"MASTER_PORT": "4000"}, Place(3, 8, 1, "n0", 4000)),
        # torchrun's agent listens on MASTER_PORT itself
        (
            TORCHRUN | {"MASTER_PORT": "4000", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Place(3, 8, 1, "n0", 4001),
        ),
        (TORCHRUN | {"ONNX_FUSE_PORT": "7"}, Place(3, 8, 1, "n0", 7)),
        (MPI | {"MASTER_ADDR": "n0"}, Place(2, 4, 0, "n0", 29500)),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Place(2, 4, 0, "127.0.0.1", 29500)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[03-05,9],x"}, Place(5, 16, 1, "gpu03", 20000)),
        (SLURM | {"SLURM_JOB_NODELIST": "a,b"}, Place(5, 16, 1, "a", 20000)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        (MPI | TORCHRUN, Place(3, 8, 1, "n0", 29500)),
    ],
)
def test_a_launcher_says_which_rank_a_process_is(
    environ: Mapping[str, str], found: Place | None
) -> None:
    assert place(environ) == found


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        (MPI, "MASTER_ADDR"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        place(environ)


@pytest.mark.parametrize(
    ("device", "number", "rank", "found"),
    [
        ("cpu", None, None, ("cpu", 0)),
        ("cuda", None, None, ("cuda", 0)),
        ("cuda:1", None, None, ("cuda", 1)),
        ("cuda", 2, None, ("cuda", 2)),
        ("cuda:2", 2, None, ("cuda", 2)),
        ("cuda", None, 3, ("cuda", 3)),
        ("cuda:1", None, 3, ("cuda", 1)),
        ("cuda:1", 2, None, "contradict"),
        ("cpu", 1, None, "contradict"),
        ("cuda", -1, None, "contradict"),
    ],
)
def test_a_device_is_named_or_that_of_the_rank(
    device: str, number: int | None, rank: int | None, found: tuple[str, int] | str
) -> None:
    if isinstance(found, tuple):
        assert gpu_of(device, number, rank) == found
        return
    with pytest.raises(UsageError, match=found):
        gpu_of(device, number, rank)


@pytest.mark.parametrize(
    ("sizes", "planned"),
    [
        ([], []),
        ([5, 5, 5], [0, 1, 1]),
        ([1, 1, 1, 8, 3], [0, 0, 0, 1, 2]),
        ([100, 1], [0, 1]),
        ([1, 100, 1, 1], [0, 1, 2, 2]),
    ],
)
def test_buckets_are_filled_in_the_order_of_the_tensors(
    sizes: list[int], planned: list[int]
) -> None:
    assert buckets.plan(sizes, most=10, first=5) == planned


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (5, 3), (2, 4), (0, 2)])
def test_the_ranks_parts_are_the_batch_in_its_order(rows: int, size: int) -> None:
    parts = [list(range(rows))[pieces(rows, size, rank)] for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


LABELS = np.array([0, 2, -100, 2])


@pytest.mark.parametrize(
    ("measure", "count"),
    [
        (Measure(), 4),
        (Measure("labels"), 4),
        (Measure("labels", -100), 3),
        (Measure("labels", -100, (1.0, 5.0, 0.5)), 2),
        (Measure("labels", -100, sums=True), 4),
    ],
)
def test_a_loss_counts_what_it_is_the_mean_of(measure: Measure, count: float) -> None:
    feeds = {"x": np.zeros((4, 3)), "labels": LABELS}
    assert counted(feeds, [measure], [])[1].tolist() == [count, 4]
    assert counted(feeds, [measure], [], spare=True)[1].tolist() == [0, 0]


# ---- the program of a step ---------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["", "optimizer", "all"])
def test_collectives_follow_each_other_and_what_they_read_alone(shard: str) -> None:
    """So they run beside the backward, in an order that is that of all ranks."""
    program = step_program(shard)
    places = [i for i, c in enumerate(program.calls) if isinstance(c.problem, Collective)]
    kinds = [program.calls[i].problem.kind for i in places]  # type: ignore[union-attr]
    assert set(kinds) == (set(COLLECTIVES) if shard else {"AllReduce"})
    written = {t.buffer: i for i, c in enumerate(program.calls) for _, t in c.writes}
    for order in (sequential(program), by_dependency(program)):
        for before, after in pairwise(places):
            assert order.before[after] >> before & 1
        for i in places:
            for _, tensor in program.calls[i].reads:
                if tensor.buffer in written and written[tensor.buffer] < i:
                    assert order.before[i] >> written[tensor.buffer] & 1
    order = sequential(program)
    backward = [i for i in range(places[-1]) if i not in places]
    free = [i for i in places if not order.before[i] >> backward[-1] & 1]
    assert len(free) >= 4  # the last bucket alone waits for the whole backward
    for before, after in pairwise(backward):
        assert order.before[after] >> before & 1


def test_weights_are_gathered_a_bucket_ahead_and_twice() -> None:
    """Beside what reads the bucket before it; and what is reduced does not wait for the end."""
    program = step_program("all", bucket=1 << 15)
    order, calls = sequential(program), program.calls
    gathers = [i for i, c in enumerate(calls) if _kind(c) == "AllGather"]
    assert len(gathers) == 6  # three weights in the forward and in the backward; one is small
    for gather in gathers[2:]:  # the first two go into one call, which folds both
        (made,) = {t.buffer for _, t in calls[gather].writes}
        reader = min(i for i, c in enumerate(calls) if made in {t.buffer for _, t in c.reads})
        before = max(i for i in range(gather) if not _kind(calls[i]))
        beside = min(i for i in range(gather, len(calls)) if not _kind(calls[i]))
        assert beside < reader
        assert not order.before[beside] >> gather & 1
        assert order.before[gather] >> before & 1  # it takes no memory before its time
    reduces = [i for i, c in enumerate(calls) if _kind(c) == "ReduceScatter"]
    assert [i for i in gathers if i > reduces[0]]  # so a gradient's memory is free again


def test_a_step_of_gathered_weights_holds_few_of_them() -> None:
    """Eight products of 512: three weights at once, where those of a whole step are no results."""
    small, large = (
        plan(step_program(shard, widths=(512,) * 9, bucket=1 << 18)).arena for shard in ("all", "")
    )
    assert small < large + 3 * 512 * 512 * 2 + (1 << 17)  # what is small stands elsewhere


def test_no_budget_makes_a_collective_run_twice() -> None:
    program = step_program("optimizer", widths=(512,) * 5)
    again = {i for c in Lifetimes(program).candidates(lambda call: 1e-6) for i in c.calls}
    assert again
    assert not {_kind(program.calls[i]) for i in again} - {""}


def _kind(call: Any) -> str:
    return call.problem.kind if isinstance(call.problem, Collective) else ""


def test_what_fills_one_bucket_does_not_wait_for_another() -> None:
    """Small reductions and casts are merged within a bucket, not over all of the backward."""
    many, one = step_program(bucket=1 << 14), step_program(bucket=1 << 30)
    for program in (many, one):
        found = [c.problem for c in program.calls if isinstance(c.problem, Collective)]
        gradients = [p for p in found if p.bucket >= 2 and p.bucket < 1 << 20]
        assert {d for p in gradients for d in p.dtypes} == {"bfloat16"}
    count = sum(isinstance(c.problem, Collective) for c in many.calls)
    assert count > sum(isinstance(c.problem, Collective) for c in one.calls)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_are_reduced_in_the_order_of_the_backward(precision: str) -> None:
    """Beside the rest of it: what casts or scales a gradient does not wait for the end."""
    network = convnet.build(convnet.Config(width=8, training=True))
    calls = step_program(model=network, rows=8, bucket=1 << 12, precision=precision).calls
    places = {c.problem.bucket: i for i, c in enumerate(calls) if isinstance(c.problem, Collective)}
    gradients = {bucket: i for bucket, i in places.items() if bucket >= GRADIENTS}
    assert len(gradients) > 4
    assert list(gradients) == sorted(gradients)
    last = max(i for i, call in enumerate(calls) if call.kernel == "ConvWeightGrad")
    assert sum(i > last for i in gradients.values()) == 1


def test_a_program_of_ranks_asks_for_its_ranks() -> None:
    program = step_program()
    call = next(c for c in program.calls if isinstance(c.problem, Collective))
    (x,) = call.launches
    pointers = {name: 256 for name, _ in (*call.reads, *call.writes)}
    with pytest.raises(DeviceError, match="distributed=True"):
        bind(x, pointers, CHIPS["H200"])


def test_without_nccl_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(DeviceError, match=r'needs NCCL \(.*\): pip install "\.\[distributed\]"'):
        nccl.bindings()


# ---- processes ---------------------------------------------------------------------------------


def worker(task: str, folder: Path) -> list[str]:
    return [sys.executable, str(WORKER), task, str(folder)]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """Losses and weights of each case by ranks, by ranks once more, and by one process."""
    found = {}
    for name, cases in (("first", CASES), ("again", AGAIN)):
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CASES", ",".join(cases))
            assert launch.run(worker("curves", folder), RANKS) == 0
        found[name], found[f"{name} other"] = (
            dict(np.load(folder / f"{rank}.npz")) for rank in range(RANKS)
        )
    folder = tmp_path_factory.mktemp("one")
    subprocess.run(worker("curves", folder), check=True)
    found["one"] = dict(np.load(folder / "one.npz"))
    return found


AGAIN = ("plain", "spread")
"""Cases that are run once more, for the same bits."""
TOLERANCE = 2e-4
"""Of 50 steps of AdamW: where a gradient is near 0, its sign decides about a step of lr."""


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_with_their_batches(
    curves: dict[str, dict[str, np.ndarray]], case: str
) -> None:
    names = [k for k in curves["one"] if k.startswith(f"{case} ") and not k.endswith(" bytes")]
    assert len(names) > len(WIDTHS)
    for name in names:
        got, expected = curves["first"][name], curves["one"][name]
        limit = WIDE.get(case, TOLERANCE)
        np.testing.assert_allclose(got, expected, rtol=limit, atol=limit, err_msg=name)
        for other in ("first other", *(("again", "again other") if case in AGAIN else ())):
            np.testing.assert_array_equal(got, curves[other][name], err_msg=f"{other} {name}")


def test_four_ranks_train_as_one_process_with_their_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = ("masked", "spread")
    monkeypatch.setenv("CASES", ",".join(cases))
    monkeypatch.setenv("RANKS", "4")
    assert launch.run(worker("curves", tmp_path), 4) == 0
    subprocess.run(worker("curves", tmp_path), check=True)
    one, *ranks = (dict(np.load(tmp_path / f"{who}.npz")) for who in ("one", *range(4)))
    for name in [name for name in one if not name.endswith(" bytes")]:
        expected = one[name]
        for got in ranks:
            np.testing.assert_array_equal(got[name], ranks[0][name], err_msg=name)
        np.testing.assert_allclose(
            ranks[0][name], expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def test_all_ranks_skip_the_steps_that_overflow_on_one(
    curves: dict[str, dict[str, np.ndarray]],
) -> None:
    """The scale of the loss is halved as often as in one process, which sees all gradients."""
    scales = [float(curves[who]["overflow scale"]) for who in ("first", "first other", "one")]
    assert len(set(scales)) == 1
    assert scales[0] < CASES["overflow"]["loss_scale"]


def test_gradients_are_added_in_bfloat16_where_that_is_asked_for(
    curves: dict[str, dict[str, np.ndarray]],
) -> None:
    low, plain = (curves["first"][f"{case} losses"] for case in ("low", "plain"))
    assert (low != plain).any()


def test_a_callback_of_one_rank_ends_the_run_of_all(tmp_path: Path) -> None:
    assert launch.run(worker("stops", tmp_path), RANKS) == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [each["steps"] for each in found] == [5, 5]


@pytest.mark.parametrize("case", ["sharded", "spread"])
def test_sharded_states_take_a_ranks_part_of_the_memory(
    curves: dict[str, dict[str, np.ndarray]], case: str
) -> None:
    own, whole = (int(curves[name][f"{case} bytes"]) for name in ("first", "one"))
    assert own <= 1.05 * whole / RANKS + 16_384  # small tensors stay whole


@pytest.mark.parametrize(
    ("kind", "message", "environ"),
    [
        ("killed", "rank 1 was ended by SIGKILL", {}),
        ("stopped", "rank 1 has not answered for 3 s: it hangs", {"ONNX_FUSE_PATIENCE": "3"}),
        ("stands", "rank 1 has been at step 3 for 3 s", {"ONNX_FUSE_STALL": "3"}),
        ("inside", "rank 1 has not come to collective 2 of the", {"ONNX_FUSE_PATIENCE": "3"}),
        ("raises", "rank 1 ended with exit code 1: ValueError: the data of this rank is torn", {}),
        ("memory", "rank 1 ended with exit code 1: onnx_fuse.errors.DeviceError: the GPU has", {}),
        ("nan", "the loss is nan", {}),
    ],
)
def test_a_rank_that_ends_or_hangs_ends_all(
    kind: str,
    message: str,
    environ: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launch.run(worker(kind, tmp_path), RANKS) == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "finished").exists()


HANGS = {
    "one": ([Sign(7, 26, 6, 4), Sign(7, 26, 6, 2)], "rank 1 has not come to collective 3 of"),
    "two": ([Sign(7, 26, 6, 0), Sign(7, 26, 6, 0), Sign(8, 30, 6, 1)], "rank 0, 1 has not come to"),
    "a step": ([Sign(8, 26, 7, 0), Sign(8, 26, 6, 9)], "rank 1 has not come to collective 10 of"),
    "all": ([Sign(7, 30, 6, 4), Sign(7, 26, 6, 4)], "all ranks have waited for one step for 26 s"),
    "not yet": ([Sign(7, 26, 6, 4), Sign(7, 24, 6, 2)], ""),
    "one works": ([Sign(7, 600, 6, 4), Sign(7, 0, 6, 0)], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_who_hangs_where_all_wait(case: str) -> None:
    """The rank whose GPU has come the least far; nobody while one does something else."""
    signs, words = HANGS[case]
    found = hang(dict(enumerate(signs)), 25.0)
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert [Sign.of(each.packed()) for each in signs] == signs


def test_a_rank_killed_under_another_launcher_ends_the_other_and_resumes(tmp_path: Path) -> None:
    """Without ours, as under mpirun: the rank that is left names the one that is gone."""
    check_killed(tmp_path, "cpu", ["in a checkpoint"], TOLERANCE)


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a model, and 45 examples, whose last batch of 8 has 5."""
    rng = np.random.default_rng(0)
    save(mlp.build(mlp.Config((16, 64, 5))), tmp_path / "model.onnx")
    x = rng.normal(size=(45, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=rng.integers(0, 5, 45))
    return tmp_path


def train(folder: Path, *options: str) -> dict[str, Any]:
    """The JSON result of the command, in a process of its own."""
    command = [sys.executable, "-m", "onnx_fuse", "train", "model.onnx", "--data", "data.npz"]
    command += ["--loss", "cross_entropy", "--batch-size", "8", "--json", "result.json"]
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_the_command_gives_the_curve_of_one_process_and_resumes_on_more(small: Path) -> None:
    one = train(small, "--epochs", "2", "--val", "data.npz", "--keep-best")
    two = train(small, "--epochs", "1", "--gpus", "2", "--checkpoint", "run", "--val", "data.npz",
                "--keep-best")  # fmt: skip
    three = train(
        small, "--epochs", "2", "--gpus", "3", "--checkpoint", "run", "--resume", "--val",
        "data.npz", "--shard", "all", "--keep-best",
    )  # fmt: skip
    assert len(two["losses"]) == 6
    np.testing.assert_allclose(three["losses"], one["losses"], rtol=1e-4)
    losses = [[m["validation_loss"] for m in run["metrics"]] for run in (three, one)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert len(list((small / "run").glob("step-*"))) == 2


@pytest.mark.usefixtures("signals_end")
def test_ctrl_c_ends_all_ranks(small: Path) -> None:
    command = [sys.executable, "-m", "onnx_fuse", "train", "model.onnx", "--data", "data.npz"]
    command += ["--loss", "cross_entropy", "--epochs", "1000000", "--gpus", "2"]
    command += ["--checkpoint", "run", "--checkpoint-every", "2"]
    process = subprocess.Popen(
        command, cwd=small, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not list(small.glob("run/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= RANKS
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert all(not Path(f"/proc/{child}").exists() for child in children)
    finally:
        process.kill()  # its ranks notice
        process.wait()
    assert not list(small.glob("model.tuned*"))


def test_a_launcher_of_another_number_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnx_fuse import cli

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["train", str(small / "model.onnx"), "--data", str(small / "data.npz"), "--loss"]
    assert cli.run_command([*given, "cross_entropy", "--gpus", "4"]) == 2
    assert "--gpus 4, but the launcher has started 2" in capsys.readouterr().err


# ---- what is seen ------------------------------------------------------------------------------

FOUND = Communication(
    (
        Exchange("AllReduce", 2, 4_000_000, 0.010, 0.012),
        Exchange("AllReduce", 3, 6_000_000, 0.012, 0.015),
        Exchange("AllReduce", 4, 1_000_000, 0.017, 0.018),
    ),
    ((0.014, 0.015), (0.0145, 0.015), (0.017, 0.018)),
)


def test_what_nothing_hid_counts_once() -> None:
    """Two calls that wait at once wait together; collectives in a row are one stretch."""
    assert FOUND.seconds == pytest.approx(0.006)
    assert FOUND.exposed == pytest.approx(0.002)
    assert str(FOUND) == "3 collectives of 11.0 MB in 6.00 ms of a step, 2.00 ms not hidden"


def exposed(
    monkeypatch: pytest.MonkeyPatch, steps: Mapping[str, tuple[float, str]], late: float
) -> float:
    """What a Timeline finds in a graph of steps: seconds, and the steps that each one follows.

    A step begins when these are over; names in capitals are collectives. Beginning and end of the
    first one are noted `late`, where there is another.
    """
    names, ends = list(steps), dict[int, float]()
    after = [[names.index(head) for head in heads.split()] for _, heads in steps.values()]
    for i, (seconds, _) in enumerate(steps.values()):
        ends[i] = seconds + max((ends[k] for k in after[i]), default=0.0)

    class Moment:
        """A moment of a graph that is over: the seconds are known."""

        at = 0.0

        def until(self, other: "Moment") -> float:
            return other.at - self.at

    def record(_: Timeline, moment: Moment, heads: tuple[int, ...]) -> timeline.Aside:
        moment.at = max((ends[k] for k in heads), default=0.0)
        seen.append(heads)
        moment.at += late * (sum(map(str.isupper, names)) > 1 and 1 < len(seen) < 4)
        return lambda: None, heads

    seen: list[tuple[int, ...]] = []

    monkeypatch.setattr(timeline, "_Moment", Moment)
    monkeypatch.setattr(timeline, "_REACHED", [None])
    monkeypatch.setattr(Timeline, "_record", record)
    reduce = Collective("AllReduce", (1000,), ("float32",), 2, 0)
    calls = [
        Call(name, (), (), (), (), problem=reduce if name.isupper() else None) for name in names
    ]
    return Timeline(calls, after, None).read().exposed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        # b waits for 2 s after a; what follows in the order, but not in the data, hides the rest
        ({"a": (1, ""), "G": (3, ""), "b": (1, "a G")}, 2),
        ({"a": (1, ""), "G": (3, ""), "b": (1, "a G"), "c": (1.5, "a")}, 0.5),
        ({"a": (1, ""), "G": (3, ""), "b": (1, "a G"), "c": (9, "a")}, 0),
        # nothing needs G but the end of the step; H follows it
        ({"a": (1, ""), "G": (2, "a"), "b": (1, "a")}, 1),
        ({"a": (1, ""), "G": (1, "a"), "H": (4, "G"), "b": (3, "a"), "c": (1, "b H")}, 2),
        # two waits, of which b and the calls behind it are in line
        ({"a": (1, ""), "G": (2, ""), "b": (1, "a G"), "H": (4, "G"), "c": (1, "b H")}, 4),
    ],
)
def test_a_collective_is_hidden_while_a_kernel_runs_that_does_not_need_it(
    steps: Mapping[str, tuple[float, str]], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exposed(monkeypatch, steps, late=0) == pytest.approx(seconds)
    assert exposed(monkeypatch, steps, late=9) == pytest.approx(seconds)


def test_a_trace_has_the_collectives_of_the_last_step() -> None:
    """They end when the step does, whose end is known on the host."""
    spans = [e for e in trace.of_communication(FOUND, 50_000.0) if e["ph"] == "X"]
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in spans] == [
        ("AllReduce", 42_000, 2000),
        ("AllReduce", 44_000, 3000),
        ("AllReduce", 49_000, 1000),
        ("wait", 46_000, 1000),
        ("wait", 46_500, 500),
        ("wait", 49_000, 1000),
    ]
    assert {e["tid"] for e in spans} == {1, 2}


def test_the_command_writes_a_trace_of_all_ranks(small: Path) -> None:
    train(small, "--epochs", "1", "--gpus", "2", "--trace", "trace.json")
    events = json.loads((small / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0 host", "rank 1 host"} <= set(names.values())
    for pid, name in names.items():
        if name.startswith("rank"):
            steps = [e for e in events if e["pid"] == pid and e["name"].startswith("step")]
            assert [e["name"] for e in steps] == [f"step {i}" for i in range(1, 7)]
