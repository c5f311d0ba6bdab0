"""Settings: file < environment < flags; unknown keys refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contracts.errors import HeadraceError, InvalidInput, NotFound
from headrace.mesh.settings import load_settings


def test_precedence(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        'url = "nats://file:1"\nmax_tries = 7\n[worker]\nengine = "sim"\nslots = 3\n'
    )
    env = {"HEADRACE_NATS_URL": "nats://env:1", "HEADRACE_WORKER_SLOTS": "4"}
    s = load_settings(tmp_path, {"worker.engine": "echo", "worker.model": None}, environ=env)
    assert (s.url, s.max_tries, s.worker.engine, s.worker.slots) == ("nats://env:1", 7, "echo", 4)
    assert load_settings(tmp_path, {"url": "nats://flag:1"}, environ=env).url == "nats://flag:1"
    assert load_settings(tmp_path, environ={}).worker.engine == "sim"


@pytest.mark.parametrize(
    ("toml", "env", "flags", "named"),
    [
        ("wrong = 1", {}, {}, "wrong"),
        ("[worker]\nengin = 'echo'", {}, {}, "worker.engin"),
        ("max_tries = 0", {}, {}, "max_tries"),
        ("[worker]\nengine = 'gpu'", {}, {}, "worker.engine"),
        ("x = ", {}, {}, "headrace.toml"),
        ("", {"HEADRACE_MAX_TRYS": "1"}, {}, "HEADRACE_MAX_TRYS"),
        ("", {"HEADRACE_WORKER_ENGIN": "1"}, {}, "HEADRACE_WORKER_ENGIN"),
        ("", {"HEADRACE_ACK_WAIT_S": "soon"}, {}, "ack_wait_s"),
        ("prefix = 'a.b'", {}, {}, "prefix"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, toml: str, env: dict[str, str], flags: dict[str, object], named: str
) -> None:
    (tmp_path / "headrace.toml").write_text(toml)
    with pytest.raises(InvalidInput, match=named.replace(".", r"\.")):
        load_settings(tmp_path, flags, environ={"HEADRACE_NATS_URL": "nats://x:1", **env})


def test_finds_a_local_mesh_or_says_how(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="headrace up"):
        load_settings(tmp_path, environ={})
    (tmp_path / "mesh.json").write_text('{"url": "nats://127.0.0.1:4333", "port": 4333}')
    assert load_settings(tmp_path, environ={}).url == "nats://127.0.0.1:4333"
    (tmp_path / "mesh.json").write_text("garbage")
    with pytest.raises(HeadraceError):
        load_settings(tmp_path, environ={})
