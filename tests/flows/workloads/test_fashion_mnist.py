"""Fashion-MNIST: where it is looked for, the idx format, and downloads (on loopback)."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import SHAPES, Array, ensure_dataset, find_dataset, load_dataset
from flows.workloads.fashion_mnist import FILES, MD5, Sources, cache_folder

TRAIN_IMAGES, TEST_IMAGES, TRAIN_LABELS, TEST_LABELS = FILES
PACKAGED = Sources().packaged
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


def compressed(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in files.items()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def nowhere(tmp_path: Path) -> Sources:
    """Sources that have nothing: empty folders, and a port where nobody listens."""
    return Sources(tmp_path / "packaged", tmp_path / "cache", "http://127.0.0.1:1")


# -- the real files ----------------------------------------------------------------------------

needs_package = pytest.mark.skipif(
    not PACKAGED.is_dir(),
    reason=f"no {PACKAGED}: install the Debian package dataset-fashion-mnist",
)


@needs_package
def test_the_debian_package_holds_fashion_mnist(tmp_path: Path) -> None:
    sources = Sources(cache=tmp_path)
    assert find_dataset("fashion_mnist", sources=sources) == str(PACKAGED)
    dataset = load_dataset("fashion_mnist", sources=sources)
    assert dataset.x_train.shape == (60_000, 784)
    assert dataset.x_test.shape == (10_000, 784)
    assert np.bincount(dataset.y_train).tolist() == [6000] * 10
    assert np.bincount(dataset.y_test).tolist() == [1000] * 10
    assert (dataset.x_train.min(), dataset.x_train.max()) == (-1, 1)
    # The paper that introduced the set gives the mean of its pixels as 0.2860, of [0, 1].
    assert (dataset.x_train.mean(dtype=np.float64) + 1) / 2 == pytest.approx(0.2860, abs=1e-4)
    assert dataset.digest == FASHION_DIGEST


@needs_package
def test_a_part_of_the_real_files_loads_alone() -> None:
    test = load_dataset("fashion_mnist", part="test")
    assert test.x_test.shape == (10_000, 784)
    assert test.x_train.shape == (0, 784)
    assert test.shape == SHAPES["fashion_mnist"]


# -- a folder that the user names --------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, compressed], ids=["plain", "gz"])
def test_pixels_and_labels_are_those_of_the_files(
    tmp_path: Path, form: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> None:
    files = small_files()
    write(tmp_path, form(files))
    dataset = load_dataset("fashion_mnist", str(tmp_path))
    pixels = np.frombuffer(files[TRAIN_IMAGES], np.uint8, offset=16).reshape(20, 784)
    np.testing.assert_allclose(dataset.x_train, (pixels / 255 - 0.5) / 0.5, rtol=1e-6, atol=1e-7)
    assert dataset.x_train.dtype == np.float32
    assert dataset.y_test.tolist() == list(files[TEST_LABELS][8:])
    assert dataset.y_test.dtype == np.int64


def test_pixels_may_be_wanted_in_the_unit_interval(tmp_path: Path) -> None:
    files = small_files()
    write(tmp_path, files)
    dataset = load_dataset("fashion_mnist", str(tmp_path), pixels="unit")
    pixels = np.frombuffer(files[TEST_IMAGES], np.uint8, offset=16).reshape(5, 784)
    np.testing.assert_allclose(dataset.x_test, pixels / 255, rtol=1e-6)


def test_the_folder_named_comes_before_all_others(tmp_path: Path) -> None:
    named, packaged, cache = (
        write(tmp_path / name, small_files(seed)) for seed, name in enumerate("npc")
    )
    sources = Sources(packaged, cache, "http://127.0.0.1:1")
    assert find_dataset("fashion_mnist", str(named), sources) == str(named)
    assert find_dataset("fashion_mnist", None, sources) == str(packaged)
    (packaged / TEST_LABELS).unlink()
    assert find_dataset("fashion_mnist", None, sources) == str(cache)
    (cache / TEST_LABELS).unlink()
    assert find_dataset("fashion_mnist", None, sources) is None


def test_the_folder_named_may_begin_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data", small_files())
    assert find_dataset("fashion_mnist", "~/data") == str(tmp_path / "data")


def test_a_folder_named_that_lacks_files_is_refused_even_if_others_have_them(
    tmp_path: Path,
) -> None:
    sources = Sources(write(tmp_path / "packaged", small_files()))
    files = small_files()
    del files[TRAIN_LABELS], files[TEST_IMAGES]
    named = write(tmp_path / "named", files)
    message = f"folder {named} has no {TEST_IMAGES} and no {TRAIN_LABELS} "
    with pytest.raises(ConfigurationError, match=message):
        load_dataset("fashion_mnist", str(named), sources=sources)


# -- damaged files -----------------------------------------------------------------------------


def damage(name: str, data: bytes, message: str, case: str) -> object:
    return pytest.param(name, data, message, id=case)


IMAGES_FILE, LABELS_FILE = small_files()[TRAIN_IMAGES], small_files()[TRAIN_LABELS]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        damage(TRAIN_IMAGES, b"", "0 bytes that begin with '', expected '00 00 08 03'", "empty"),
        damage(
            TRAIN_IMAGES, IMAGES_FILE[:9], "9 bytes that begin with '00 00 08 03'", "header cut"
        ),
        damage(
            TRAIN_IMAGES,
            IMAGES_FILE[:-1],
            "holds 15679 values, expected 15680: its header announces 20 x 28 x 28",
            "cut",
        ),
        damage(TRAIN_LABELS, LABELS_FILE + b"\0", "holds 21 values, expected 20", "too long"),
        damage(TRAIN_LABELS, IMAGES_FILE, "'00 00 08 03', expected '00 00 08 01'", "images"),
        damage(
            TRAIN_IMAGES,
            bytes([0, 0, 8, 3]) + b"\xff" * 12,
            "holds 0 values, expected 79228162458924105385300197375",
            "absurd header",
        ),
        damage(
            TRAIN_IMAGES, idx(np.zeros((20, 8, 8))), "images of 8 x 8, expected 28 x 28", "size"
        ),
        damage(
            TRAIN_LABELS, idx(np.zeros(19)), "20 images and .* 19 labels, expected one", "count"
        ),
        damage(TRAIN_LABELS, idx(np.full(20, 10)), "has the label 10, expected 0 to 9", "label"),
        damage(
            f"{TRAIN_IMAGES}.gz",
            gzip.compress(IMAGES_FILE)[:-100],
            "cannot be read: Compressed file ended",
            "gz cut",
        ),
        damage(f"{TRAIN_LABELS}.gz", LABELS_FILE, "Not a gzipped file", "not gz"),
        damage(
            f"{TRAIN_LABELS}.gz",
            gzip.compress(LABELS_FILE)[:-8] + b"\0" * 8,
            "CRC check failed",
            "gz sum",
        ),
        damage(
            f"{TRAIN_LABELS}.gz",
            gzip.compress(LABELS_FILE)[:10] + b"\xff" * 40,
            "cannot be read: Error -3",
            "gz bytes",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    write(tmp_path, {**small_files(), name: data})
    with pytest.raises(ConfigurationError, match=message) as raised:
        load_dataset("fashion_mnist", str(tmp_path))
    assert str(tmp_path / name) in str(raised.value)


# -- downloads ---------------------------------------------------------------------------------


@dataclass
class Host:
    """A server on loopback with the files; `cut` names those whose transfer breaks half-way."""

    files: dict[str, bytes]
    url: str = ""
    cut: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    host = Host(compressed(small_files()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/data/")
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
        host.url = f"http://127.0.0.1:{server.server_port}/data"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield host
        server.shutdown()
        thread.join()


@pytest.fixture
def sources(nowhere: Sources, host: Host) -> Sources:
    md5 = {name: hashlib.md5(data).hexdigest() for name, data in host.files.items()}
    return replace(nowhere, host=host.url, md5=md5)


def test_what_is_nowhere_is_downloaded_once(host: Host, sources: Sources) -> None:
    assert find_dataset("fashion_mnist", sources=sources) is None
    assert host.asked == []
    dataset = load_dataset("fashion_mnist", sources=sources)
    assert dataset.y_train.tolist() == list(small_files()[TRAIN_LABELS][8:])
    assert sorted(host.asked) == names_in(sources.cache) == sorted(MD5)
    load_dataset("fashion_mnist", sources=sources)
    assert len(host.asked) == 4
    assert find_dataset("fashion_mnist", sources=sources) == str(sources.cache)


def test_a_corrupted_file_is_refused_and_nothing_of_it_is_left(
    host: Host, sources: Sources
) -> None:
    name = f"{FILES[0]}.gz"
    good = host.files[name]
    host.files[name] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(ConfigurationError, match=f"{name} was refused: its MD5 is .* expected"):
        load_dataset("fashion_mnist", sources=sources)
    assert names_in(sources.cache) == []
    host.files[name] = good
    assert len(load_dataset("fashion_mnist", sources=sources).y_train) == 20


def test_a_download_that_breaks_off_leaves_whole_files_only_and_goes_on_from_there(
    host: Host, sources: Sources
) -> None:
    name = f"{FILES[2]}.gz"
    host.cut.add(name)
    with pytest.raises(ConfigurationError, match="dataset-fashion-mnist"):
        load_dataset("fashion_mnist", sources=sources)
    whole = [f"{FILES[0]}.gz", f"{FILES[1]}.gz"]
    assert names_in(sources.cache) == sorted(whole)
    host.cut.clear()
    load_dataset("fashion_mnist", sources=sources)
    assert names_in(sources.cache) == sorted(MD5)
    assert all(host.asked.count(file) == 1 for file in whole)


def test_processes_that_download_at_once_do_not_disturb_each_other(
    host: Host, sources: Sources
) -> None:
    with ThreadPoolExecutor(6) as pool:
        loads = [
            pool.submit(load_dataset, "fashion_mnist", None, "both", sources) for _ in range(6)
        ]
        digests = {load.result().digest for load in loads}
    assert len(digests) == 1
    assert names_in(sources.cache) == sorted(MD5)


def test_a_file_that_the_host_does_not_have(host: Host, sources: Sources) -> None:
    del host.files[f"{FILES[0]}.gz"]
    with pytest.raises(ConfigurationError, match="failed: HTTP Error 404"):
        load_dataset("fashion_mnist", sources=sources)
    assert names_in(sources.cache) == []


def test_with_none_of_the_sources_the_error_says_what_to_do(
    nowhere: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ConfigurationError) as raised:
        ensure_dataset("fashion_mnist", sources=nowhere)
    message = str(raised.value)
    assert "apt install dataset-fashion-mnist" in message
    assert "name a folder" in message
    assert all(name in message for name in FILES)
    assert str(nowhere.packaged) in message
    assert nowhere.host in message


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, nowhere: Sources) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ConfigurationError, match="dataset-fashion-mnist"):
        ensure_dataset("fashion_mnist", sources=replace(nowhere, cache=blocked / "cache"))


def test_the_cache_follows_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere" / "dps" / "fashion-mnist"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / ".cache" / "dps" / "fashion-mnist"


def test_the_published_checksums_cover_every_file() -> None:
    assert sorted(MD5) == sorted(f"{name}.gz" for name in FILES)
