"""The parts of the digits example that need no launcher."""

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from syncline.collectives.transports.threads import create_groups
from syncline.reducer import BucketTimes, IterationStatistics

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
if not EXAMPLE.is_dir():
    pytest.skip("the examples are not part of the wheel", allow_module_level=True)
for package in ("sklearn", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason="install syncline-ddp[examples]")


def example(name):
    """A module of the example, which imports its neighbours as a script does."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


data, gradient_check, model, options = map(example, ("data", "gradient_check", "model", "options"))
placement, progress, replicas, report, timeline = map(example, ("placement", "progress", "replicas", "report", "timeline"))

BATCH_SIZE = 24


@pytest.fixture(scope="module")
def train():
    return data.load()[0]


def on_ranks(size, play):
    """What `play(group)` returns on each of `size` ranks, which are threads; one that fails leaves none waiting."""
    groups = create_groups(size, timeout_s=30)

    def guarded(group):
        try:
            return play(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, groups))


# ---- data ----


def test_the_split_is_fixed_and_stratified():
    (train, test), (again, _) = data.load(), data.load()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert train.tensors[0].dtype is torch.float32
    assert train.tensors[0].shape[1:] == (1, 8, 8)
    assert 0 <= train.tensors[0].min() < train.tensors[0].max() == 1
    for digit in range(10):
        assert int((test.tensors[1] == digit).sum()) == pytest.approx(int((train.tensors[1] == digit).sum()) / 4, abs=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_parts_of_the_ranks_are_the_first_batch_of_one_process(train, ranks):
    parts = [next(iter(data.loader_of_rank(train, rank, ranks, BATCH_SIZE, seed=5))) for rank in range(ranks)]
    images, labels = data.first_batch_of_one_process(train, BATCH_SIZE, seed=5)
    for rank, (part_images, part_labels) in enumerate(parts):
        assert torch.equal(part_images, images[rank::ranks])
        assert torch.equal(part_labels, labels[rank::ranks])


# ---- gradient check ----


def difference(train, ranks, *, spoil=None):
    """The example's gradient check; `spoil` may replace the images and labels of the last rank."""
    network = model.DigitsNetwork()
    whole = data.first_batch_of_one_process(train, BATCH_SIZE, seed=0)

    def play(group):
        part = next(iter(data.loader_of_rank(train, group.rank, ranks, BATCH_SIZE, seed=0)))
        if spoil is not None and group.rank == ranks - 1:
            part = spoil(*part)
        return gradient_check.largest_relative_difference(network, part, whole, group)

    found = on_ranks(ranks, play)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_averaged_gradient_is_that_of_one_process(train, ranks):
    torch.manual_seed(ranks)
    assert 0 < difference(train, ranks) < gradient_check.TOLERANCE


@pytest.mark.ranks
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda images, labels: (images.flip(3), labels), id="other images"),
        pytest.param(lambda images, labels: (images, torch.cat([(labels[:1] + 1) % 10, labels[1:]])), id="one wrong label"),
        pytest.param(lambda images, labels: (images[1:], labels[1:]), id="one image missing"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_part_is_seen(train, ranks, spoil):
    torch.manual_seed(ranks)
    assert difference(train, ranks, spoil=spoil) > 100 * gradient_check.TOLERANCE


@pytest.mark.ranks
def test_ranks_may_start_from_different_weights_and_keep_them(train):
    whole = data.first_batch_of_one_process(train, BATCH_SIZE, seed=0)
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        networks.append(model.DigitsNetwork())
    before = [{name: tensor.clone() for name, tensor in network.state_dict().items()} for network in networks]

    def play(group):
        part = next(iter(data.loader_of_rank(train, group.rank, 2, BATCH_SIZE, seed=0)))
        return gradient_check.largest_relative_difference(networks[group.rank], part, whole, group)

    assert max(on_ranks(2, play)) < gradient_check.TOLERANCE
    for network, state in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
        assert all(parameter.grad is None for parameter in network.parameters())


# ---- replicas ----


def trained_replica(rank, touch):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network(torch.arange(12.0).view(4, 3)).square().sum().backward()
    optimizer.step()
    if rank == 1:
        touch(network, optimizer)
    return network, optimizer


def next_float(tensor):
    with torch.no_grad():
        tensor.copy_(torch.nextafter(tensor, tensor + 1))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("touch", "identical"),
    [
        pytest.param(lambda network, optimizer: None, True, id="nothing"),
        pytest.param(lambda network, optimizer: next_float(network[0].bias[:1]), False, id="a parameter's last bit"),
        pytest.param(lambda network, optimizer: next_float(network[1].running_var[1:]), False, id="a buffer's last bit"),
        pytest.param(
            lambda network, optimizer: next_float(optimizer.state[network[0].weight]["momentum_buffer"][0, 0]),
            False,
            id="a momentum's last bit",
        ),
    ],
)
def test_replicas_are_compared_bit_by_bit(touch, identical):
    # Made one after the other on this thread: ranks that are threads share torch's random numbers.
    trained = [trained_replica(rank, touch) for rank in range(2)]

    def play(group):
        return replicas.replicas_are_identical(*trained[group.rank], group)

    assert on_ranks(2, play) == [identical, identical]


# ---- report ----


def a_report(**changes):
    values = {
        "backend": "mpi",
        "library": "mpi: Some MPI 1.2",
        "ranks": 4,
        "nodes": 1,
        "threads_per_rank": 2,
        "epochs": 20,
        "global_batch_size_images": 96,
        "training_time_s": 2.5,
        "test_accuracy_percent": 98.25,
        "images_per_second": 12345.6,
        "step_time_median_ms": 4.321,
        "waiting_share_of_step_percent": 6.5,
        "replicas_bitwise_identical": True,
        "first_gradient_largest_relative_difference": 1.5e-6,
        "versions": {"python": "3.12.0"},
    }
    return report.Report(**{**values, **changes})


def test_the_report_as_text():
    lines = a_report().table().splitlines()
    assert lines[0] == "backend              mpi: Some MPI 1.2"
    assert "ranks                4 ranks on 1 node, 2 threads each" in lines
    assert "images per second    12,346" in lines
    assert "gradient difference  1.5e-06 (rounding)" in lines
    assert "NO" in a_report(replicas_bitwise_identical=False).table()
    assert "TOO LARGE" in a_report(first_gradient_largest_relative_difference=1e-4).table()


def test_the_report_as_json(tmp_path):
    path = tmp_path / "report.json"
    a_report().write(path)
    read = json.loads(path.read_text())
    assert read["ranks"] == 4
    assert read["replicas_bitwise_identical"] is True
    assert read["step_time_median_ms"] == 4.321
    assert report.Report(**read) == a_report()


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"replicas_bitwise_identical": False}, False),
        ({"first_gradient_largest_relative_difference": 1e-5}, False),
        ({"first_gradient_largest_relative_difference": float("nan")}, False),
    ],
)
def test_exact_is_both(changes, exact):
    assert a_report(**changes).is_exact() is exact


def test_versions_name_what_is_installed():
    found = report.versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["syncline-ddp"]


# ---- timeline ----


def made_up_step(rank):
    start = 1000.0 * rank
    buckets = [
        BucketTimes(nbytes=2**18, ready=start + 0.0030, started=start + 0.0031, finished=start + 0.0042 + 0.001 * rank),
        BucketTimes(nbytes=2**16, ready=start + 0.0045, started=start + 0.0046, finished=start + 0.0055),
        BucketTimes(nbytes=2**14, ready=start + 0.0060, started=start + 0.0061),
    ]
    seen = IterationStatistics(
        start,
        backward_started=start + 0.0026,
        last_gradient=start + 0.0060,
        finished=start + 0.0075,
        waited_s=0.0012,
        buckets=buckets,
    )
    return timeline.StepTimes(start + 0.002, start + 0.0021, seen)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_timeline_is_a_picture_in_colour(tmp_path, ranks):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "picture"
    timeline.draw([made_up_step(rank) for rank in range(ranks)], path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = torch.from_numpy(imread(path, format="png"))[..., :3]
    for colour in (timeline.FORWARD, timeline.BACKWARD, timeline.WAITING, timeline.WRITING, timeline.FLIGHT):
        assert int(((pixels - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01).sum()) > 500


# ---- options, placement, progress ----


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number of at least 1, found '0'"),
        (["--epochs", "many"], "argument --epochs: expected a whole number of at least 1, found 'many'"),
        (["--batch-size", "1438"], "argument --batch-size: expected a whole number from 1 to 1437, found '1438'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 4294967295, found '-1'"),
        (["--backend", "pigeon"], "argument --backend: invalid choice: 'pigeon' (choose from"),
        (["--report", "a", "--timeline", "a"], "--report and --timeline both name a; expected two files"),
    ],
)
def test_bad_words_are_refused_at_once(words, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "expected"), [(1, 96), (2, 96), (3, 96), (4, 96), (5, 95), (7, 98), (200, 200)])
def test_the_default_batch_divides_over_the_ranks(ranks, expected):
    assert options.parse([]).batch_size_for(ranks) == expected


@pytest.mark.parametrize("name", ["--report", "--timeline"])
def test_a_path_that_cannot_be_written_is_found_out_before_training(name, tmp_path, capsys):
    path = tmp_path / "no such folder" / "file"
    with pytest.raises(SystemExit) as ended:
        options.check_with_group(options.parse([name, str(path)]), create_groups(1)[0])
    assert ended.value.code == 2
    assert f"{name}: {path} cannot be written: No such file or directory" in capsys.readouterr().err


def test_asking_whether_a_path_can_be_written_leaves_it_as_it_is(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    options.check_with_group(options.parse(["--report", str(old), "--timeline", str(new)]), create_groups(1)[0])
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.ranks
def test_all_ranks_end_when_rank_0_has_a_complaint(capsys):
    chosen = options.parse(["--batch-size", "97"])

    def play(group):
        with pytest.raises(SystemExit) as ended:
            options.check_with_group(chosen, group)
        return ended.value.code

    assert on_ranks(2, play) == [2, 2]
    assert capsys.readouterr().err.count("expected a multiple of the number of ranks, 2, found 97") == 1


@pytest.mark.parametrize(
    ("places", "threads"),
    [
        ([("a", range(8))], [8]),
        ([("a", range(8))] * 3, [2, 2, 2]),
        ([("a", range(2))] * 4, [1, 1, 1, 1]),
        ([("a", [0, 1]), ("a", [2, 3])], [2, 2]),
        ([("a", range(4)), ("b", range(4))], [4, 4]),
    ],
)
def test_ranks_that_share_cores_divide_them(places, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    placements = [placement.Placement(host, frozenset(cores)) for host, cores in places]
    assert [placement.threads_for(placements, rank) for rank in range(len(placements))] == threads


def test_omp_num_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    placements = [placement.Placement("a", frozenset(range(64)))]
    assert placement.threads_for(placements, 0) == torch.get_num_threads()


def test_progress_is_whole_lines_where_there_is_no_terminal(capsys):
    assert list(progress.epochs_with_progress(3, is_shown=True)) == [0, 1, 2]
    said = capsys.readouterr().err
    assert "\r" not in said
    assert "3/3" in said.splitlines()[-1]


def test_progress_is_quiet_where_it_is_not_shown(capsys):
    assert list(progress.epochs_with_progress(3, is_shown=False)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
