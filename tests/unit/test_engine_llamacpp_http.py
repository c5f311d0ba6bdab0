"""Items and questions over a socket file, with a server that does what llama.cpp does at its worst."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.inference_worker.engines.llamacpp_http import Questions, Stream
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[Callable[[socket.socket], None]], str]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def read_request(connection: socket.socket) -> None:
    with connection.makefile("rb") as request:
        length = 0
        while (line := request.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        request.read(length)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Listens; each connection's request is read, then answered by the given function."""
    folder = tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp")
    path = str(Path(folder.name) / "s.sock")
    listener = socket.socket(socket.AF_UNIX)

    def start(answer: Callable[[socket.socket], None]) -> str:
        listener.bind(path)
        listener.listen()

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        read_request(connection)
                        answer(connection)

        threading.Thread(target=run, daemon=True).start()
        return path

    with folder:
        yield start
        listener.close()


def stream(path: str) -> Stream:
    return Stream(path, {"Authorization": "Bearer k"}, "/v1/completions", b"{}")


def wait_for_end(connection: socket.socket) -> None:
    while connection.recv(1):
        pass


def test_events_come_without_their_wrapping(serve: Serve) -> None:
    sent = [
        b'data: {"a":1}\n\n',
        b": ping\n\n",
        b'data: {"b":',
        b'2}\n\ndata: {"c":3}\n\n',
        b"data: [DONE]\n\n",
    ]
    path = serve(lambda c: c.sendall(OK + b"".join(map(chunk, sent)) + b"0\r\n\r\n"))
    assert list(stream(path).events()) == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


def test_a_refusal_is_an_event(serve: Serve) -> None:
    path = serve(lambda c: c.sendall(b'HTTP/1.1 400 Bad Request\r\nContent-Length: 14\r\n\r\n{"error":"no"}'))
    assert list(stream(path).events()) == [b'{"error":"no"}']


@pytest.mark.parametrize("sent", [b"", OK + chunk(b'data: {"a":1}\n\n')], ids=["before", "within"])
def test_a_stop_ends_it_whatever_it_waits_for(serve: Serve, sent: bytes) -> None:
    waits = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(sent)
        waits.set()
        wait_for_end(connection)

    one = stream(serve(answer))
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(one.events()))
    thread.start()
    assert waits.wait(10)
    one.stop()
    one.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert got in ([], [b'{"a":1}'])


def test_a_stop_before_its_beginning(serve: Serve) -> None:
    one = stream(serve(wait_for_end))
    one.stop()
    assert list(one.events()) == []


def test_a_server_that_goes_away_is_a_death(serve: Serve) -> None:
    one = stream(serve(lambda c: None))
    with pytest.raises(EngineDied, match="in the middle"):
        list(one.events())


def test_an_end_in_the_middle_is_for_the_reader_to_see(serve: Serve) -> None:
    """An answer without its last event is a death too: see `Answer.output`."""
    one = stream(serve(lambda c: c.sendall(OK + chunk(b'data: {"a":1}\n\n'))))
    assert list(one.events()) == [b'{"a":1}']


def test_nobody_listening_is_a_death(tmp_path: Path) -> None:
    with pytest.raises(EngineDied):
        list(stream(str(tmp_path / "none")).events())
    with pytest.raises(EngineDied, match="does not answer"):
        Questions(str(tmp_path / "none"), {}).get("/slots")


def test_a_question_is_asked_again_on_a_new_connection(serve: Serve) -> None:
    # Each connection is closed after its answer, which says nothing of it.
    path = serve(lambda c: c.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}'))
    questions = Questions(path, {})
    assert [questions.get("/a"), questions.post("/b", {}), questions.get("/c")] == [{"a": 1}] * 3
    questions.close()


@pytest.mark.parametrize(
    ("body", "type_"),
    [
        (b'{"error":{"message":"bad template","type":"invalid_request_error","code":400}}', "invalid_prompt"),
        (b"nonsense", "engine_error"),
    ],
)
def test_a_refused_question_is_the_items(serve: Serve, body: bytes, type_: str) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    path = serve(lambda c: c.sendall(head + body))
    with pytest.raises(ItemFailed) as caught:
        Questions(path, {}).post("/apply-template", {})
    assert caught.value.error.type == type_
