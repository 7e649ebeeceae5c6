"""Fashion-MNIST: where it is looked for, the idx format, and downloads (on loopback)."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import Array, FashionMnist
from flows.workloads import fashion_mnist as module

FILES = tuple(module.MD5)
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = FILES
PACKAGED = module.PACKAGED
FASHION_DIGEST = "507b3d4b3e7a48ad85d7b50d356a7d4b5860893312a9ad4ea7452e811f7d59e2"


def idx(array: Array) -> bytes:
    """The idx file of an array of unsigned bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def small_files(seed: int = 0) -> dict[str, bytes]:
    """The four files with 20 training and 5 test images, uncompressed, by name."""
    rng = np.random.default_rng(seed)
    return {
        TRAIN_IMAGES: idx(rng.integers(0, 256, (20, 28, 28))),
        TRAIN_LABELS: idx(rng.integers(0, 10, 20)),
        TEST_IMAGES: idx(rng.integers(0, 256, (5, 28, 28))),
        TEST_LABELS: idx(rng.integers(0, 10, 5)),
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, where there is no package, and nothing answers at the host."""
    monkeypatch.setattr(module, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(module, "HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "dps" / "fashion-mnist"


@pytest.mark.skipif(
    not PACKAGED.is_dir(),
    reason=f"no {PACKAGED}: install the Debian package dataset-fashion-mnist",
)
def test_the_debian_package_holds_fashion_mnist() -> None:
    dataset = FashionMnist().load()
    assert dataset.x_train.shape == (60_000, 784)
    assert np.bincount(dataset.y_test).tolist() == [1000] * 10
    assert (dataset.x_train.min(), dataset.x_train.max()) == (-1, 1)
    # The paper that introduced the set gives the mean of its pixels as 0.2860, of [0, 1].
    assert (dataset.x_train.mean(dtype=np.float64) + 1) / 2 == pytest.approx(0.2860, abs=1e-4)
    assert dataset.digest == FASHION_DIGEST


def test_pixels_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    files = small_files()
    write(tmp_path, {f"{name}.gz": gzip.compress(data) for name, data in files.items()})
    pixels = np.frombuffer(files[TRAIN_IMAGES], np.uint8, offset=16).reshape(20, 784)
    choices: dict[module.Pixels, Array] = {
        "symmetric": (pixels / 255 - 0.5) / 0.5,
        "unit": pixels / 255,
    }
    for choice, expected in choices.items():
        dataset = FashionMnist(tmp_path, choice).load()
        np.testing.assert_allclose(dataset.x_train, expected, rtol=1e-6, atol=1e-7)
        assert dataset.x_train.dtype == np.float32
        assert dataset.y_test.tolist() == list(files[TEST_LABELS][8:])
    test = FashionMnist(tmp_path).load("test")
    assert (test.x_test.shape, test.x_train.shape) == ((5, 784), (0, 784))


def test_the_folder_named_comes_before_the_package_and_that_before_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "packaged"
    for seed, folder in enumerate((tmp_path / "named", packaged, cache)):
        write(folder, small_files(seed))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FashionMnist(Path("~/named")).find() == tmp_path / "named"
    assert FashionMnist().find() == packaged
    (packaged / TEST_LABELS).unlink()
    assert FashionMnist().find() == cache
    (tmp_path / "named" / TEST_IMAGES).unlink()
    with pytest.raises(ConfigurationError, match=f"folder .*named has no {TEST_IMAGES}"):
        FashionMnist(tmp_path / "named").load()


IMAGES_FILE, LABELS_FILE = small_files()[TRAIN_IMAGES], small_files()[TRAIN_LABELS]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (TRAIN_IMAGES, b"", "begins with ''; expected an idx file"),
        (TRAIN_IMAGES, IMAGES_FILE[:-1], "15679 .*If it is damaged, download it again"),
        (TRAIN_LABELS, IMAGES_FILE, "begins with '00 00 08 03'"),
        (TRAIN_IMAGES, idx(np.zeros((20, 8, 8))), r"is \[20, 8, 8\], expected \[20, 28, 28\]"),
        (
            TRAIN_LABELS,
            idx(np.zeros(19)),
            r"expected \[19, 28, 28\] with a label",
        ),
        (TRAIN_LABELS, idx(np.full(20, 10)), "with a label from 0 to 9"),
        (f"{TRAIN_LABELS}.gz", LABELS_FILE, "Not a gzipped file"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    write(tmp_path, {**small_files(), name: data})
    with pytest.raises(ConfigurationError, match=message) as raised:
        FashionMnist(tmp_path).load()
    assert str(tmp_path / name) in str(raised.value)


# -- downloads ---------------------------------------------------------------------------------


@dataclass
class Host:
    """A server on loopback with the files; `cut` names those whose transfer breaks half-way."""

    files: dict[str, bytes]
    cut: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def host(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    files = {f"{name}.gz": gzip.compress(data) for name, data in small_files().items()}
    host = Host(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            host.asked.append(name)
            if name not in host.files:
                self.send_error(404)
                return
            body = host.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if name in host.cut else body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        md5 = {name: hashlib.md5(files[f"{name}.gz"]).hexdigest() for name in FILES}
        monkeypatch.setattr(module, "MD5", md5)
        monkeypatch.setattr(module, "HOST", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield host
        server.shutdown()
        thread.join()


def test_a_missing_data_set_is_downloaded_once(host: Host, cache: Path) -> None:
    assert FashionMnist().find() is None
    for _ in range(2):
        dataset = FashionMnist().load()
        assert dataset.y_train.tolist() == list(small_files()[TRAIN_LABELS][8:])
    assert sorted(host.asked) == names_in(cache) == sorted(host.files)


def test_a_corrupted_file_is_refused_and_nothing_of_it_is_left(host: Host, cache: Path) -> None:
    name = f"{FILES[0]}.gz"
    host.files[name] = host.files[name][:-1] + b"?"
    with pytest.raises(ConfigurationError, match=f"{name} was refused: its MD5 is .* expected"):
        FashionMnist().load()
    assert names_in(cache) == []


def test_an_interrupted_download_leaves_whole_files_only_and_continues(
    host: Host, cache: Path
) -> None:
    host.cut.add(f"{FILES[2]}.gz")
    with pytest.raises(ConfigurationError, match="dataset-fashion-mnist"):
        FashionMnist().load()
    whole = [f"{FILES[0]}.gz", f"{FILES[1]}.gz"]
    assert names_in(cache) == sorted(whole)
    host.cut.clear()
    FashionMnist().load()
    assert names_in(cache) == sorted(host.files)
    assert all(host.asked.count(file) == 1 for file in whole)


def test_without_any_source_the_error_says_what_to_do(cache: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        FashionMnist().load()
    for text in ("apt install dataset-fashion-mnist", "set dataset.folder", *FILES, module.HOST):
        assert text in str(raised.value)
