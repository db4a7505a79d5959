"""Data: prepared sets as a user gets them, synthetic patterns, and a user's files."""

import gzip
import importlib.util
import io
import itertools
import os
import shutil
import socket
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
from conftest import LIMIT, ROOT, SHARED
from PIL import Image

from uhop_jax import data


def test_prepared_sets_are_the_raw_files(prepared):
    number = LIMIT["mnist"]
    images = data.images("mnist", split="test", directory=prepared)
    raw = gzip.open(SHARED / "t10k-images-idx3-ubyte.gz").read()
    raw = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28, 1)[:number]
    labels = gzip.open(SHARED / "t10k-labels-idx1-ubyte.gz").read()
    labels = np.frombuffer(labels, np.uint8, offset=8)[:number]
    assert images.pixels.dtype == np.float32 and images.labels.dtype == np.int32
    order = {x.tobytes(): label for x, label in zip(raw, labels, strict=True)}
    pixels = np.round(images.pixels * 255).astype(np.uint8)
    assert len({x.tobytes() for x in pixels}) == len(order) == number
    for x, label in zip(pixels, images.labels, strict=True):
        assert order[x.tobytes()] == label

    images = data.images("cifar10", split="test", directory=prepared, limit=50)
    assert images.pixels.shape == (50, 32, 32, 3)
    picture = np.asarray(Image.open(SHARED / "cifar10_test.webp").convert("RGB"))
    raw = picture.reshape(100, 32, 100, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)
    labels = np.load(SHARED / "cifar10_labels.npz")["test"]
    order = {
        x.tobytes(): y for x, y in zip(raw[: LIMIT["cifar10"]], labels, strict=False)
    }
    pixels = np.round(images.pixels * 255).astype(np.uint8)
    for x, label in zip(pixels, images.labels, strict=True):
        assert order[x.tobytes()] == label


def test_reading_needs_no_tensorflow(prepared):
    code = (
        "import sys; from uhop_jax import data; "
        f"data.load('mnist', directory={str(prepared)!r}); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_missing_split_is_named(prepared):
    info = prepared / "cifar10" / "3.0.2" / "dataset_info.json"
    copy = prepared.parent / "one_split"
    (copy / "cifar10" / "3.0.2").mkdir(parents=True, exist_ok=True)
    text = info.read_text().replace('"train"', '"validation"')
    path = copy / "cifar10" / "3.0.2" / "dataset_info.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="'train' of cifar10 is not in data.dir"):
        data.images("cifar10", split="train", directory=copy)
    for text in ("[]", "{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match="info.json is damaged .* no description"):
            data.images("cifar10", split="train", directory=copy)


def test_without_a_network_the_error_comes_at_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
    pytest.importorskip("pooch", reason="needs the extra `data`")

    def unreachable(*_, **__):
        raise OSError

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setitem(sys.modules, "tensorflow", sys)  # its import takes seconds
    for name in ("mnist", "cifar100", "tiny_imagenet"):
        with pytest.raises(ValueError, match=f"{name} is not in data.dir .*"):
            data.images(name, directory=tmp_path)


@pytest.mark.parametrize("module", ["tensorflow_datasets", "tensorflow"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"pip install 'uhop-jax\[data\]'"):
        data.images("mnist", directory=tmp_path)


def test_tiny_imagenet_is_read_from_its_folder(tmp_path):
    root = tmp_path / "tiny_imagenet" / "tiny-imagenet-200"
    rng = np.random.default_rng(0)
    pictures = {}

    def write(path, mode="RGB"):
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (64, 64) if mode == "L" else (64, 64, 3)
        picture = Image.fromarray(rng.integers(0, 255, shape, np.uint8))
        picture.save(path, "JPEG")
        pictures[path.name] = np.asarray(Image.open(path).convert("RGB"))

    for wnid in ("n02", "n01"):
        for index in range(2):
            path = root / "train" / wnid / "images" / f"{wnid}_{index}.JPEG"
            write(path, "L" if index else "RGB")
    write(root / "val" / "images" / "val_0.JPEG")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t9\t9\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    images = data.images("tiny_imagenet", directory=tmp_path)
    assert images.labels.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(
        images.pixels[2] * 255, pictures["n01_0.JPEG"], atol=0.01
    )
    images = data.images("tiny_imagenet", split="test", directory=tmp_path, limit=1)
    assert images.pixels.shape == (1, 64, 64, 3) and images.labels.tolist() == [1]
    (root / "train" / "n02" / "images" / "n02_0.JPEG").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="n02_0.JPEG is damaged .* no picture"):
        data.images("tiny_imagenet", directory=tmp_path)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\n")
    with pytest.raises(ValueError, match="is no folder of Tiny ImageNet"):
        data.images("tiny_imagenet", split="test", directory=tmp_path)


@pytest.mark.slow  # the other sets are prepared by the same code
def test_twenty_classes_of_tiny_imagenet_are_prepared(tmp_path):
    path = SHARED / "tiny_imagenet_20.npz"
    script = ROOT / "scripts" / "prepare_data.py"
    if not path.exists():
        pytest.skip(f"needs the raw Tiny ImageNet file {path}")

    def prepare(source):
        command = [sys.executable, str(script), str(source), str(tmp_path)]
        command.append("tiny_imagenet")
        return subprocess.run(command, capture_output=True, text=True)

    assert "lacks tiny_imagenet_20.npz of tiny_imagenet" in prepare(tmp_path).stderr
    result = prepare(SHARED)
    assert not result.returncode, result.stderr[-2000:]
    with np.load(path) as file:
        raw = dict(file)
    for split, part, number in (("train", "train", 500), ("test", "val", 50)):
        images = data.images("tiny_imagenet", split=split, directory=tmp_path)
        assert np.bincount(images.labels).tolist() == [number] * 20
        ends = raw[f"{part}_offset"]
        decoded = {}
        for index in range(0, len(ends) - 1, 97):
            stored = raw[f"{part}_jpeg"][ends[index] : ends[index + 1]].tobytes()
            picture = np.asarray(Image.open(io.BytesIO(stored)).convert("RGB"))
            decoded[picture.tobytes()] = raw[f"{part}_label"][index]
        loaded = zip(images.raw, images.labels, strict=True)
        labels = {x.tobytes(): label for x, label in loaded}
        for picture, label in decoded.items():
            assert labels[picture] == label
    root = tmp_path / "tiny_imagenet" / "tiny-imagenet-200"
    assert (root / "wnids.txt").read_text().split() == raw["wnids"].tolist()
    words = (root / "words.txt").read_text().splitlines()
    assert [line.split("\t")[1] for line in words] == raw["names"].tolist()


def test_digits_are_real_and_complete():
    images = data.images("digits")
    assert images.pixels.shape == (1797, 8, 8, 1)
    assert images.pixels.dtype == np.float32
    assert images.pixels.min() == 0 and images.pixels.max() == 1
    assert np.bincount(images.labels).tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    patterns = data.load("digits", limit=5)
    assert patterns.values.shape == (5, 64) and patterns.shape == (8, 8, 1)
    assert patterns.names == ("0", "1", "2", "3", "4")


def test_synthetic_patterns_have_the_stated_law():
    sphere = data.load("synthetic:sphere:32", limit=500).values
    np.testing.assert_allclose(np.linalg.norm(sphere, axis=1), 1, rtol=1e-5)
    gaussian = data.synthetic("gaussian", 2000, 16, seed=1)
    assert abs(gaussian.mean()) < 0.03 and abs(gaussian.std() - 1) < 0.03
    correlated = data.synthetic("correlated", 200, 400, seed=2)
    unit = correlated / np.linalg.norm(correlated, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(200, 1)]
    assert abs(cosines.mean() - 0.9) < 0.02
    np.testing.assert_array_equal(
        data.synthetic("gaussian", 3, 4, seed=5),
        data.synthetic("gaussian", 3, 4, seed=5),
    )


def write_images(folder, count=3, size=(6, 5), mode="RGB"):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
    for index in range(count):
        pixels = rng.integers(0, 255, shape, np.uint8)
        Image.fromarray(pixels).save(folder / f"p{index}.png")
    return folder


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    folder = write_images(tmp_path / "photos")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="photos: 3 pictures .*; not read: notes.txt$"):
        patterns = data.read_patterns(folder)
    assert patterns.names == ("p0.png", "p1.png", "p2.png")
    assert patterns.shape == (5, 6, 3) and patterns.values.shape == (3, 90)
    expected = np.asarray(Image.open(folder / "p1.png")).ravel() / 255
    np.testing.assert_allclose(patterns.values[1], expected, rtol=1e-6)
    grey = data.read_patterns(write_images(tmp_path / "grey", mode="L"))
    assert grey.shape == (5, 6, 1)


@pytest.mark.parametrize(
    ("array", "shape", "scale"),
    [
        (np.arange(6).reshape(2, 3) / 10, (3,), 1),
        (np.arange(12, dtype=np.uint8).reshape(2, 3, 2), (3, 2, 1), 255),
        (np.arange(24, dtype=np.float16).reshape(2, 2, 2, 3), (2, 2, 3), 1),
    ],
)
def test_arrays_are_read(tmp_path, array, shape, scale):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "one.npz", anything=array)
    np.savez(tmp_path / "two.npz", patterns=array, labels=np.zeros(2))
    for name in ("a.npy", "one.npz", "two.npz"):
        patterns = data.load(str(tmp_path / name))
        assert patterns.shape == shape and patterns.values.dtype == np.float32
        expected = array.reshape(2, -1).astype(float) / scale
        np.testing.assert_allclose(patterns.values, expected, rtol=1e-3)


def broken(tmp_path, case):
    """Writes a broken input and returns its path."""
    path = tmp_path / "x.npy"
    match case:
        case "missing":
            return tmp_path / "nothing.npy"
        case "empty folder":
            (tmp_path / "empty").mkdir()
            return tmp_path / "empty"
        case "other files":
            (tmp_path / "text").mkdir()
            (tmp_path / "text" / "a.txt").write_text("a")
            return tmp_path / "text"
        case "truncated image":
            folder = write_images(tmp_path / "cut", size=(40, 40))
            whole = (folder / "p1.png").read_bytes()
            (folder / "p1.png").write_bytes(whole[: len(whole) // 2])
            return folder
        case "no image":
            folder = write_images(tmp_path / "bad")
            (folder / "p2.png").write_bytes(b"hello")
            return folder
        case "sizes":
            folder = write_images(tmp_path / "sizes")
            Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "q.png")
            return folder
        case "grey and colour":
            folder = write_images(tmp_path / "mixed")
            Image.fromarray(np.zeros((5, 6), np.uint8)).save(folder / "q.png")
            return folder
        case "truncated":
            np.save(path, np.zeros((50, 50)))
            path.write_bytes(path.read_bytes()[:500])
        case "truncated archive":
            np.savez(tmp_path / "x.npz", np.zeros((50, 50)))
            archive = tmp_path / "x.npz"
            archive.write_bytes(archive.read_bytes()[:500])
            return archive
        case "objects":
            np.save(path, np.asarray([{}, {}]), allow_pickle=True)
        case "text":
            np.save(path, np.asarray([["a", "b"]]))
        case "one axis":
            np.save(path, np.zeros(4))
        case "no rows":
            np.save(path, np.zeros((0, 4)))
        case "nan":
            np.save(path, np.asarray([[1.0, np.nan]]))
        case "two arrays":
            np.savez(tmp_path / "y.npz", a=np.zeros((2, 2)), b=np.zeros((2, 2)))
            return tmp_path / "y.npz"
        case "suffix":
            (tmp_path / "x.csv").write_text("1,2")
            return tmp_path / "x.csv"
    return path


BROKEN = {
    "missing": "no such file or folder: .*nothing.npy",
    "empty folder": "empty holds no images",
    "other files": r"text holds no images \(.png",
    "truncated image": "p1.png is damaged or truncated, or is no picture",
    "no image": "p2.png is damaged or truncated, or is no picture of at most",
    "sizes": "one size: p0.png is 6 x 5, q.png 4 x 4",
    "grey and colour": "all grey or all colour: p0.png is colour, q.png grey",
    "truncated": "x.npy is damaged",
    "truncated archive": "x.npz is damaged or truncated",
    "objects": "x.npy is damaged or truncated, or is no .npy file of numbers",
    "text": "x.npy must hold real numbers, got dtype <U1",
    "one axis": r"x.npy must have shape .* got \(4,\)",
    "no rows": r"x.npy holds no patterns, its shape is \(0, 4\)",
    "nan": "x.npy holds 1 NaN or infinite values of 2",
    "two arrays": "y.npz must hold one array, .* it holds a, b",
    "suffix": "x.csv is no .npy, .npz or folder of images",
}


@pytest.mark.parametrize(("case", "message"), BROKEN.items(), ids=BROKEN)
def test_broken_input_gets_one_sentence(tmp_path, case, message):
    with pytest.raises(ValueError, match=message) as raised:
        data.read_patterns(broken(tmp_path, case))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.load("mnits"), "unknown data 'mnits'; choose one of digits"),
        (lambda: data.load("synthetic:cube"), "choose one of sphere, gaussian"),
        (lambda: data.load("synthetic:sphere:x"), "synthetic:KIND:DIMENSION, got"),
        (lambda: data.load("synthetic:sphere:" + "9" * 5000), "KIND:DIMENSION, got"),
        (
            lambda: data.load("synthetic:sphere:999999999"),
            r"10000 patterns of dimension 999999999: 37252.9 GiB are more than the mem",
        ),
        (lambda: data.images("digits", split="val"), "choose one of train, test"),
        (lambda: data.images("digits", limit=0), "limit must be at least 1, got 0"),
        (lambda: data.synthetic("sphere", 3, 1), "dimension must be at least 2"),
        (
            lambda: data.synthetic("correlated", 3, 4, correlation=1.0),
            r"correlation must be in \[0, 1\), got 1.0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def refused(path, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged TIFF
        with pytest.raises(ValueError, match=message) as raised:
            data.read_patterns(path)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.float32(1), r"a.npy must have shape .* got \(\)"),
        (np.asarray([[1e300, 1.0]]), "a.npy holds 1 NaN or infinite values of 2"),
        (np.zeros(3, [("x", "f4")]), "a.npy must hold real numbers"),
        (np.ones((2, 3), complex), "a.npy must hold real numbers"),
    ],
)
def test_other_wrong_arrays_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    refused(tmp_path / "a.npy", message)


def test_only_bytes_are_scaled(tmp_path):
    spins = np.asarray([[1, -1], [-1, 1]], np.int8)
    np.save(tmp_path / "a.NPY".lower(), spins)
    (tmp_path / "a.npy").rename(tmp_path / "B.NPY")
    np.testing.assert_array_equal(data.read_patterns(tmp_path / "B.NPY").values, spins)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_damaged_arrays_are_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    values = np.random.default_rng(0).random((40, 40))
    if suffix == "npy":
        np.save(path, values)
    else:
        np.savez_compressed(path, patterns=values, labels=np.arange(40))
    whole = path.read_bytes()
    for at in (0, 30, 60, 200, 1000, 3000):
        path.write_bytes(whole[:at])
        refused(path, rf"a.{suffix} is damaged")
        if suffix == "npz" and at >= 60:
            path.write_bytes(whole[:at] + b"\xff" * 20 + whole[at + 20 :])
            refused(path, r"a.npz is damaged")
    if suffix == "npy":
        for shape in (b"(40, 4( ", b"(9**99, )", b"(99999999999999, 40)"):
            path.write_bytes(whole.replace(b"(40, 40)", shape))
            refused(path, "a.npy is damaged")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("patterns.txt", "hello")
        refused(path, "a.npz must hold real numbers")
        path.write_bytes(b"PK\3\4" + bytes(100))
        refused(path, "a.npz is damaged")


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp", "tif"])
@pytest.mark.parametrize("channels", [(), (3,)], ids=["grey", "colour"])
def test_truncated_images_are_refused(tmp_path, ending, channels):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, *channels), np.uint8)
    buffer = io.BytesIO()
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending)
    Image.fromarray(pixels).save(buffer, kind)
    whole = buffer.getvalue()
    for length in (0, 1, 8, 20, 40, 60, 100, len(whole) // 2):
        (tmp_path / f"a.{ending}").write_bytes(whole[:length])
        refused(tmp_path, f"a.{ending} is damaged or truncated, or is no picture")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_images_are_refused_not_clipped(tmp_path, dtype):
    image = Image.fromarray(np.arange(16).reshape(4, 4).astype(dtype) * 500)
    image.save(tmp_path / "a.tif")
    refused(tmp_path, "a.tif has more than 8 bits a channel")


def test_files_in_a_folder_other_than_pictures_are_named(tmp_path):
    picture = Image.fromarray(np.zeros((4, 4), np.uint8))
    for name in ("a.png", "h.PNG", "i.JPG", "b.gif", "c.jfif", "d.ppm"):
        picture.save(tmp_path / name, "JPEG" if name == "c.jfif" else None)
    (tmp_path / "sub.png").mkdir()
    picture.save(tmp_path / "sub.png" / "z.png")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "linked.png").symlink_to("a.png")
    rest = "not read: b.gif, c.jfif, d.ppm, loop, sub.png/$"
    with pytest.warns(UserWarning, match=rf"4 pictures \(.png, .*\); {rest}"):
        patterns = data.read_patterns(tmp_path)
    assert patterns.names == ("a.png", "h.PNG", "i.JPG", "linked.png")
    for number in range(9):
        (tmp_path / f"n{number}.txt").touch()
    with pytest.warns(UserWarning, match="d.ppm, loop, n0.txt, n1.txt and 8 more$"):
        data.read_patterns(tmp_path)
    (tmp_path / "e.png").symlink_to("gone.png")
    refused(tmp_path, "e.png is a link to gone.png, no file")


def test_names_that_are_no_utf8_are_escaped(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "é.png")
    names = data.read_patterns(tmp_path).names
    assert set(names) == {r"caf\xe9.png", "é.png"}


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_pictures_are_turned_upright(tmp_path, ending):
    pixels = np.kron(np.asarray([[30, 90], [150, 220]], np.uint8), np.ones((3, 4)))
    # The picture as the camera stored it, and its orientation (EXIF tag 0x0112).
    for name, turns, orientation in (("a", 0, 1), ("b", 2, 3), ("c", 1, 6)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture = Image.fromarray(np.rot90(pixels, turns).astype(np.uint8))
        exact = {"jpg": {"quality": 100}, "webp": {"lossless": True}}.get(ending, {})
        picture.save(tmp_path / f"{name}.{ending}", exif=exif, **exact)
    patterns = data.read_patterns(tmp_path)
    assert patterns.shape[:2] == (6, 8)
    for channel in np.moveaxis(patterns.values.reshape(3, 6, 8, -1), -1, 0):
        for picture in channel:
            np.testing.assert_allclose(picture * 255, pixels, atol=3)


@pytest.mark.parametrize("ending", ["tif", "webp", "png"])
def test_files_of_several_pictures_are_refused(tmp_path, ending):
    frames = [Image.fromarray(np.full((4, 4), x, np.uint8)) for x in (9, 99, 199)]
    path = tmp_path / f"a.{ending}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    refused(tmp_path, f"a.{ending} holds 3 pictures: save each in a file of its own")


@pytest.mark.parametrize("shape", [(20, 3, 6, 6), (20, 6, 6, 5), (20, 6, 6, 2)])
def test_channels_come_last(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    got = ", ".join(map(str, shape))
    refused(
        tmp_path / "a.npy", rf"1, 3 or 4 channels, on the last axis, .* \({got}\): nu"
    )


def test_paths_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.save(tmp_path / "x.npy", np.eye(3))
    for read in (data.load, data.read_patterns):
        assert read("~/x.npy").shape == (3,)
    for split, kind in itertools.product(("train", "test"), "ab"):
        (tmp_path / "set" / split / kind).mkdir(parents=True)
        write_images(tmp_path / "set" / split / kind, 2)
    assert data.labelled_images("~/set", split="test").classes == ("a", "b")
    (tmp_path / "set" / "test" / "loose.png").touch()
    (tmp_path / "set" / "test" / "b" / "p1.png").rename(tmp_path / "set/test/b/p1.gif")
    with pytest.warns(UserWarning) as caught:
        images = data.labelled_images("~/set", split="test")
    assert images.labels.tolist() == [0, 0, 1]
    ends = [str(warning.message).partition("; ")[2] for warning in caught]
    assert ends == ["not read: loose.png", "not read: b/p1.gif"]
    with pytest.raises(ValueError, match="no such file or folder: ~nobody-here/x"):
        data.load("~nobody-here/x.npy")


def test_arrays_larger_than_memory_are_refused(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    whole = (tmp_path / "a.npy").read_bytes()
    header = whole[:128].replace(b"(2, 2), }         ", b"(17179869184, 2), }")[:128]
    (tmp_path / "a.npy").write_bytes(header)
    os.truncate(tmp_path / "a.npy", 128 + 2**38)  # a file with a hole, of no size
    np.savez_compressed(tmp_path / "b.npz", np.zeros((1000, 1000), np.uint8))
    monkeypatch.setattr("uhop_jax._files.machine_memory", lambda: 2**19)
    refused(tmp_path / "a.npy", "a.npy: 128.0 GiB are more than the memory of this")
    refused(tmp_path / "b.npz", "b.npz: 0.0 GiB are more than the memory")
    pictures = write_images(tmp_path / "photos", 9, (300, 300))
    refused(pictures, "photos: 0.0 GiB are more than the memory")
    assert data.read_patterns(tmp_path / "a.npy", limit=2).values.shape == (2, 2)


def test_numbers_that_look_like_the_end_of_an_archive_are_read(tmp_path):
    numbers = np.zeros((2, 40), np.uint8)
    numbers[0, :4] = list(b"PK\5\6")
    np.save(tmp_path / "a.npy", numbers)
    assert zipfile.is_zipfile(tmp_path / "a.npy")
    assert data.read_patterns(tmp_path / "a.npy").values.shape == (2, 40)


@pytest.mark.parametrize("damage", ["encrypted", "compression", "bits", "header"])
def test_odd_archives_are_refused(tmp_path, damage):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, np.random.default_rng(0).random((40, 40)))
    whole = bytearray(path.read_bytes())
    central = whole.index(b"PK\1\2")
    match damage:
        case "encrypted":
            whole[6] |= 1
            whole[central + 8] |= 1
        case "compression":
            whole[8] = whole[central + 10] = 99
        case "bits":
            whole[60:80] = b"\xff" * 20
        case "header":
            array = io.BytesIO()
            np.save(array, np.zeros(3))
            huge = array.getvalue().replace(
                b"(3,), }" + b" " * 12, b"(9" + b"9" * 13 + b",), }"
            )
            assert huge != array.getvalue()
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("x.npy", huge)
            whole = path.read_bytes()
    path.write_bytes(whole)
    refused(path, "a.npz is damaged")


@pytest.mark.parametrize("source", ["", "synthetic:sphere:²"])
def test_odd_sources_are_refused(source):
    with pytest.raises(ValueError, match="unknown data|synthetic data is"):
        data.load(source)


@pytest.mark.parametrize("source", ["digits", "synthetic:sphere", "nothing.npy"])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(source, limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1, got {limit}"):
        data.load(source, limit=limit)


def test_a_source_without_the_files_is_refused_at_once(tmp_path):
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow, of the extra `data`")
    with pytest.raises(ValueError, match="lacks t10k-images-idx3-ubyte.gz, .* of"):
        data.prepare("mnist", tmp_path / "prepared", source=tmp_path)


def test_damaged_records_are_refused(prepared, tmp_path):
    shutil.copytree(prepared / "mnist", tmp_path / "mnist")
    record = next(tmp_path.rglob("*test*record*"))
    record.write_bytes(record.read_bytes()[: record.stat().st_size // 2])
    with pytest.raises(ValueError, match="mnist in data.dir .* cannot be read"):
        data.images("mnist", split="test", directory=tmp_path)
