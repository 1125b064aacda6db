"""MNIST's files: what is said of missing and wrong ones, and fetching them from a server on loopback."""

import errno
import gzip
import hashlib
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from moonopt import cli
from moonopt.bench.data import mnist, segments
from moonopt.bench.data.idx import write_idx
from moonopt.errors import UserError

FILES = tuple(mnist.SHA256)
WHOLE, TRUNCATED, CUT, WITHOUT_LENGTH = "whole", "truncated", "cut", "without length"


class Handler(BaseHTTPRequestHandler):
    """Sends what the server has under a path: whole, less than it says, cut and saying so, or without saying how much."""

    def do_GET(self):
        self.server.asked.append(self.path)
        how, content = self.server.answers.get(self.path, (None, b""))
        if how is None:
            self.send_error(404)
            return
        body = content[:-5] if how in (TRUNCATED, CUT) else content
        self.send_response(200)
        if how != WITHOUT_LENGTH:
            self.send_header("Content-Length", str(len(content if how == TRUNCATED else body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server on loopback, with paths and how each is answered; it also knows what it was asked."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.asked = {}, []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def contents(tmp_path, monkeypatch):
    """Small digits in the place of MNIST's, by file."""
    generator = torch.Generator().manual_seed(0)
    parts = [*segments.digits(30, generator), *segments.digits(10, generator)]
    for file, values in zip(FILES, parts, strict=True):
        write_idx(tmp_path / file, values)
    contents = {file: (tmp_path / file).read_bytes() for file in FILES}
    monkeypatch.setattr(mnist, "SHA256", {file: hashlib.sha256(each).hexdigest() for file, each in contents.items()})
    return contents


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def call(monkeypatch, capsys, folder):
    """Calls ``moonopt data`` for the folder; gives exit code, output and errors."""

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["moonopt", "data", *words, "--data", str(folder)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return called


def serve(server, contents, name, how=WHOLE, change=lambda content: content):
    """A mirror by that name, which has every file compressed."""
    server.answers |= {f"/{name}/{file}.gz": (how, gzip.compress(change(each))) for file, each in contents.items()}
    return f"{server.address}/{name}/{{file}}.gz"


def broken(server, contents, kind):
    """The address of a mirror that is broken in one way, and what is said of it."""
    if kind == "404":
        return f"{server.address}/nowhere/{{file}}.gz", "HTTP 404 Not Found"
    if kind == "no network":
        return "http://127.0.0.1:1/{file}.gz", "no connection ("
    if kind == "truncated body":
        return serve(server, contents, "short", TRUNCATED), "truncated after "
    if kind == "truncated file":
        return serve(server, contents, "cut", CUT), "truncated or damaged ("
    return serve(server, contents, "other", change=lambda content: content[:-1] + b"!"), "wrong checksum, SHA-256 "


KINDS = ("404", "no network", "truncated body", "truncated file", "wrong checksum")


def test_fetching_writes_four_whole_files_and_asks_once(server, contents, folder, call, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a"), serve(server, contents, "b")))
    code, output, errors = call("fetch", "mnist")
    assert (code, errors) == (0, "")
    assert output == f"The data of mnist are in {folder}, whole.\n"
    assert {path.name: path.read_bytes() for path in (folder / "mnist").iterdir()} == contents
    assert server.asked == [f"/a/{file}.gz" for file in FILES]
    assert call("fetch", "multimnist")[0] == 0
    assert len(server.asked) == 4
    assert call("verify", "mnist") == (0, "The data of mnist are here and whole.\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_mirror_fails_the_next_one_is_asked(kind, server, contents, folder, call, monkeypatch):
    first, _ = broken(server, contents, kind)
    monkeypatch.setattr(mnist, "MIRRORS", (first, serve(server, contents, "good")))
    assert call("fetch", "mnist")[0] == 0
    assert {path.name: path.read_bytes() for path in (folder / "mnist").iterdir()} == contents


@pytest.mark.parametrize("kind", KINDS)
def test_where_all_mirrors_fail_one_sentence_says_what_was_tried(kind, server, contents, folder, call, monkeypatch):
    mirror, text = broken(server, contents, kind)
    monkeypatch.setattr(mnist, "MIRRORS", (f"{server.address}/first/{{file}}.gz", mirror))
    code, output, errors = call("fetch", "mnist")
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    address = mirror.format(file=FILES[0])
    assert errors.startswith(f"Error: {FILES[0]} cannot be fetched. Tried {server.address}/first/{FILES[0]}.gz: HTTP 404 ")
    assert f"; {address}: " in errors
    assert text in errors.partition(address)[2]
    assert f"by hand into {folder / 'mnist'}: {', '.join(FILES)}, plain or with .gz." in errors
    assert not list(folder.rglob("*"))


def test_a_body_of_unknown_length_is_fetched(server, contents, folder, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a", WITHOUT_LENGTH),))
    mnist.fetch(folder)


def test_what_is_there_is_kept_and_the_rest_fetched(server, contents, folder, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a"),))
    (folder / "mnist").mkdir()
    (folder / "mnist" / f"{FILES[0]}.gz").write_bytes(gzip.compress(contents[FILES[0]]))
    mnist.fetch(folder)
    assert server.asked == [f"/a/{file}.gz" for file in FILES[1:]]
    assert not (folder / "mnist" / FILES[0]).exists()


def test_a_file_of_ones_own_is_not_replaced(server, contents, folder, call, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a"),))
    (folder / "mnist").mkdir()
    (folder / "mnist" / FILES[1]).write_bytes(b"mine")
    code, _, errors = call("fetch", "mnist")
    assert code == 2
    assert f"{FILES[1]} is not MNIST's: the SHA-256 of its content is " in errors
    assert (folder / "mnist" / FILES[1]).read_bytes() == b"mine"


def test_a_full_disk_leaves_no_part_of_a_file_and_is_not_the_mirrors_fault(server, contents, folder, call, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a"), serve(server, contents, "b")))
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which does not say of which file

    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, errors = call("fetch", "mnist")
    assert code == 2
    assert f"No space left on device: '{folder / 'mnist' / FILES[0]}'" in errors
    assert len(server.asked) == 1
    assert not list((folder / "mnist").iterdir())


def test_a_terminal_sees_a_progress_bar(server, contents, folder, call, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(mnist, "MIRRORS", (serve(server, contents, "a"),))
    code, _, errors = call("fetch", "mnist")
    assert code == 0
    assert f"{FILES[0]}.gz" in errors
    assert "━" in errors


def test_what_is_missing_is_named_with_what_to_do(contents, folder, call):
    (folder / "mnist").mkdir()
    (folder / "mnist" / f"{FILES[0]}.gz").write_bytes(b"")
    text = mnist.missing(folder)
    assert text.startswith(f"Not in {folder / 'mnist'}: {', '.join(FILES[1:])}. Fetch MNIST with `moonopt data fetch mnist`")
    code, _, errors = call("verify", "mnist")
    assert (code, errors) == (2, f"Error: {text}\n")
    with pytest.raises(UserError, match="Fetch MNIST"):
        mnist.read(folder)
    assert FILES[1] in call("list")[1]


@pytest.mark.parametrize(("cut", "text"), [(-20, "is truncated or damaged"), (None, "is not MNIST's")])
def test_verify_tells_damaged_files_from_other_ones(cut, text, contents, folder, call):
    (folder / "mnist").mkdir()
    for file, content in contents.items():
        (folder / "mnist" / f"{file}.gz").write_bytes(gzip.compress(content))
    assert call("verify", "mnist")[0] == 0
    last = folder / "mnist" / f"{FILES[3]}.gz"
    last.write_bytes(gzip.compress(b"another")[:cut])
    code, _, errors = call("verify", "mnist")
    assert code == 2
    assert f"{last} {text}" in errors


def stand_in(folder, **changes):
    """Four files by MNIST's names, of which some are changed."""
    (folder / "mnist").mkdir()
    values = {"train_images": torch.zeros(24, 28, 28), "train_labels": torch.arange(24) % 10}
    values |= {"t10k_images": torch.zeros(5, 28, 28), "t10k_labels": torch.arange(5)}
    for file, each in zip(FILES, (values | changes).values(), strict=True):
        write_idx(folder / "mnist" / file, each.to(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"train_labels": torch.arange(23) % 10}, "has 24 images, but .*train-labels-idx1-ubyte has 23 labels."),
        ({"t10k_labels": torch.arange(5) + 7}, "t10k-labels-idx1-ubyte must be from 0 to 9, found 11."),
        ({"t10k_images": torch.zeros(5, 27, 27)}, r"must be squares of one size, found \(28, 28\) and \(27, 27\)."),
        ({"train_labels": torch.zeros(24, 1)}, "wrong number of dimensions: found 2, expected 1."),
    ],
)
def test_files_that_do_not_fit_together_are_refused(changes, text, folder):
    stand_in(folder, **changes)
    with pytest.raises(UserError, match=text):
        mnist.read(folder)


def test_any_four_idx_files_can_stand_in(folder):
    stand_in(folder)
    (train, labels), (test, _) = mnist.read(folder)
    assert (train.shape, labels.shape, test.shape) == ((24, 28, 28), (24,), (5, 28, 28))


@pytest.mark.skipif("MOONOPT_DATA" not in os.environ, reason="needs MNIST in $MOONOPT_DATA")
def test_the_checksums_are_those_of_the_real_files():
    folder = Path(os.environ["MOONOPT_DATA"])
    mnist.verify(folder)
    (train, labels), (test, _) = mnist.read(folder)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
