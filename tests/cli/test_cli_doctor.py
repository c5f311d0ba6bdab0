"""`headrace doctor` as it is run: exit codes, JSON, and what it says of brokers that are not as they should be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.doctor_local import check_sync
from headrace.mesh import jsapi
from headrace.mesh.checks.marks import read_mark
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.cli.harness import Up, headrace

KEYS = {"check", "state", "found", "mend"}
USERS = """
authorization { users: [
  { user: admin, password: s3cret-admin }
  { user: blind, password: s3cret-blind, permissions: { publish: ["hr.api.>"], subscribe: ["_INBOX.>"] } }
] }
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker with two users and nothing on it."""
    running = NatsServer(tmp_path / "nats", durability="relaxed", extra_config=USERS)
    running.start()
    yield running
    running.kill()


def on(server: NatsServer, work: Callable[[Mesh], Awaitable[Any]]) -> Any:
    """Do something on a broker as its administrator."""

    async def run() -> Any:
        settings = Settings(url=server.url, user="admin", password="s3cret-admin", durability="relaxed")
        async with await Mesh.connect(settings, name="admin") as mesh:
            return await work(mesh)

    return asyncio.run(run())


def doctor(
    server: NatsServer, *arguments: str, cwd: Path, user: str = "admin", in_url: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict[str, str]]]]:
    """The command's end, and its findings by check."""
    password = f"s3cret-{user}"
    url = server.url.replace("nats://", f"nats://{user}:{password}@") if in_url else server.url
    credentials = {} if in_url else {"HEADRACE_USER": user, "HEADRACE_PASSWORD": password}
    done = headrace("doctor", "--url", url, "--json", *arguments, cwd=cwd, **credentials)
    assert "s3cret" not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list), (found, done.stderr)
    assert found
    by_check: dict[str, list[dict[str, str]]] = {}
    for finding in found:
        assert set(finding) == KEYS
        assert finding["state"] in {"ok", "warn", "fail"}
        assert finding["found"]
        assert bool(finding["mend"]) == (finding["state"] != "ok"), finding
        by_check.setdefault(finding["check"], []).append(finding)
    failed = any(f["state"] == "fail" for f in found)
    assert done.returncode == (1 if failed else 0)
    return done, by_check


# --- a running mesh ---------------------------------------------------------------------------------


def test_a_sound_mesh_fails_nothing_and_exits_0(tmp_path: Path) -> None:
    up = Up(tmp_path / "D")  # one of its own: what other tests leave behind is not sound
    try:
        done = up.run("doctor", "--json")
    finally:
        up.kill()
    assert done.returncode == 0, done.stdout
    found = {f["check"]: f for f in json.loads(done.stdout)}
    assert all(set(f) == KEYS for f in found.values())
    for check in (
        "server version", "jetstream", "account limits", "stream HR_TASKS", "consumers", "strangers",
        "workers of generate", "stranded tasks", "completion", "stream history", "leases of completion",
        "jobs that stand still", "gateway", "clock", "broker store",
    ):  # fmt: skip
        assert found[check]["state"] == "ok", found[check]
    assert found["durability"]["state"] == "warn"
    assert "sync_interval" in found["durability"]["found"]
    assert any(check.startswith("open files of ") for check in found)


def test_a_service_that_hangs_is_named(tmp_path: Path) -> None:
    up = Up(tmp_path / "D")
    try:
        for name in ("completion", "gateway"):
            stopped = up.pid(name)
            try:
                os.kill(stopped, signal.SIGSTOP)
                done = up.run("doctor", "--json", timeout=60)
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert done.returncode == 1
            (found,) = [f for f in json.loads(done.stdout) if f["check"] == name]
            assert found["state"] == "fail"
            assert f"headrace {name}" in found["mend"]
    finally:
        up.kill()


def test_a_loss_is_shown_and_accepted_by_its_number(tmp_path: Path) -> None:
    up = Up(tmp_path / "D")
    try:
        assert up.run("doctor").returncode == 0

        async def lose(mesh: Mesh) -> None:
            await publish(mesh, "HR_DEAD", "hr.dead.test", b"{}")
            mark = await read_mark(mesh, "HR_DEAD")
            assert mark is not None

        async def remake(mesh: Mesh) -> None:
            await jsapi.call(mesh, "STREAM.DELETE.HR_DEAD")
            await provision(mesh)

        def run(work: Callable[[Mesh], Awaitable[None]]) -> None:
            async def connected() -> None:
                async with await Mesh.connect(Settings(url=up.url), name="test") as mesh:
                    await work(mesh)

            asyncio.run(connected())

        run(lose)
        assert up.run("doctor").returncode == 0  # which marks the streams
        run(remake)
        done = up.run("doctor", "--json")
        assert done.returncode == 1
        (found,) = [f for f in json.loads(done.stdout) if f["check"] == "stream history"]
        assert "HR_DEAD was made anew" in found["found"]
        assert found["mend"].endswith("headrace doctor --accept-loss 1")

        wrong = up.run("doctor", "--accept-loss", "5", "--json")
        assert wrong.returncode == 1
        assert "there is no loss 5" in wrong.stderr
        assert json.loads(wrong.stdout)["error"]["code"] == "not_found"

        accepted = up.run("doctor", "--accept-loss", "1", "--json")
        assert accepted.returncode == 0, accepted.stdout
        assert "loss 1 is accepted" in accepted.stderr
        again = up.run("doctor", "--accept-loss", "1", "--json")
        assert (again.returncode, "loss 1 is accepted already" in again.stderr) == (0, True)
        assert up.run("doctor", "--accept-loss", "x").returncode == 2
    finally:
        up.kill()


# --- no mesh, no broker, no services -----------------------------------------------------------------


def test_no_mesh_at_all_is_a_finding(tmp_path: Path) -> None:
    done = headrace("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)
    assert (found["check"], found["state"]) == ("mesh", "fail")
    assert "headrace up" in found["found"]
    table = headrace("doctor", cwd=tmp_path)
    assert table.returncode == 1
    assert "fail" in table.stdout


def test_no_broker_is_a_finding_without_credentials(tmp_path: Path) -> None:
    url = "nats://someone:s3cret-url@127.0.0.1:9"
    done = headrace("doctor", "--url", url, "--json", cwd=tmp_path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found[0]["check"], found[0]["state"]) == ("server", "fail")
    assert "no broker answers at 127.0.0.1:9" in found[0]["found"]
    assert "--url" in found[0]["mend"]
    assert "s3cret" not in done.stdout + done.stderr


@pytest.mark.parametrize("in_url", [True, False], ids=["url", "settings"])
def test_wrong_credentials_are_a_finding_that_shows_none(
    server: NatsServer, tmp_path: Path, in_url: bool
) -> None:
    done, found = doctor(server, cwd=tmp_path, user="nobody", in_url=in_url)
    assert done.returncode == 1
    assert "uthorization" in found["server"][0]["found"]


def test_an_empty_broker_names_all_that_is_missing(server: NatsServer, tmp_path: Path) -> None:
    done, found = doctor(server, cwd=tmp_path)
    assert done.returncode == 1
    assert (found["stream HR_TASKS"][0]["found"], found["stream HR_TASKS"][0]["mend"]) == (
        "missing",
        "headrace init",
    )
    assert "HR_RESULTS/completion" in found["consumers"][0]["found"]
    for service in ("completion", "gateway"):
        assert found[service][0]["state"] == "fail"
        assert f"headrace {service}" in found[service][0]["mend"]
    assert found["jetstream"][0]["state"] == "ok"


def test_a_broker_elsewhere_with_nothing_running(server: NatsServer, tmp_path: Path) -> None:
    on(server, provision)
    done, found = doctor(server, cwd=tmp_path, in_url=True)
    assert done.returncode == 1  # the services do not run
    assert {c for c, f in found.items() if any(x["state"] == "fail" for x in f)} == {"completion", "gateway"}
    (durability,) = found["durability"]
    assert durability["state"] == "warn"
    assert "one replica of HR_TASKS; HR_RESULTS" in durability["found"]
    assert "sync_interval: always" in durability["mend"]
    assert "replicas = 3" in durability["mend"]


def test_a_limit_that_drops_work_is_a_failure_with_its_mend(server: NatsServer, tmp_path: Path) -> None:
    async def break_it(mesh: Mesh) -> None:
        await provision(mesh)
        config = (await jsapi.stream_info(mesh, "HR_TASKS"))["config"]
        await jsapi.call(
            mesh, "STREAM.UPDATE.HR_TASKS", {**config, "discard": "old", "max_age": 3_600_000_000_000}
        )

    on(server, break_it)
    _, found = doctor(server, cwd=tmp_path)
    assert [f["state"] for f in found["stream HR_TASKS"]] == ["fail", "fail"]
    assert [f["found"].split(":")[0] for f in found["stream HR_TASKS"]] == [
        "discard is old",
        "max_age is 3600 s",
    ]
    assert "nats stream edit HR_TASKS --discard new" in found["stream HR_TASKS"][0]["mend"]
    init = headrace(
        "init", "--url", server.url, cwd=tmp_path, HEADRACE_USER="admin", HEADRACE_PASSWORD="s3cret-admin"
    )
    assert init.returncode == 1
    assert "discard is 'old', should be 'new'" in init.stderr


def test_who_may_not_look_gets_findings_and_no_crash(server: NatsServer, tmp_path: Path) -> None:
    on(server, provision)
    began = time.monotonic()
    _, found = doctor(server, cwd=tmp_path, user="blind")
    assert time.monotonic() - began < 20
    unread = {
        c
        for c, fs in found.items()
        if fs[0]["found"].startswith("cannot be read: this user may not ask $JS.API.")
    }
    assert {"jetstream", "stream HR_TASKS", "workers", "strangers", "stranded tasks", "clock"} <= unread | {
        "workers"
    }
    assert all(fs[0]["state"] == "warn" for c, fs in found.items() if c in unread)
    assert found["durability"][0]["state"] == "warn"  # and not: safe


# --- a local broker's configuration --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "profile", "state", "words"),
    [
        ("safe", "safe", "ok", "sync_interval: always"),
        ("relaxed", "relaxed", "warn", "relaxed"),
        ("relaxed", "safe", "fail", "the profile is safe"),
    ],
)
def test_what_the_local_server_syncs(
    tmp_path: Path, durability: Any, profile: str, state: str, words: str
) -> None:
    server = NatsServer(tmp_path / "nats", durability=durability)
    server.write_config()
    mesh_file = {"url": server.url, "port": server.port, "durability": profile}
    (tmp_path / "mesh.json").write_text(json.dumps(mesh_file))
    settings = Settings(url=server.url, dir=str(tmp_path), durability=profile)  # type: ignore[arg-type]
    (found,) = check_sync(settings, ["HR_TASKS"])
    assert found.state == state
    assert words in found.found
    assert bool(re.search(r"--durability safe", found.mend)) == (state != "ok")
