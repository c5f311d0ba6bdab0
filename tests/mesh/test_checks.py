"""Every way in which a broker may be set wrongly: what is found, how it is mended, and who refuses to work with it.

Each case is a real broker with that setting. The mend is tried where it is a setting that can be changed back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.contracts.api import Finding
from headrace.contracts.errors import Conflict, HeadraceError
from headrace.contracts.messages import FunctionSpec
from headrace.mesh import jsapi
from headrace.mesh.checks.backlog import check_dead_letters, check_stranded, check_workers, wanted_leases
from headrace.mesh.checks.consumer_rules import CONSUMER_RULES
from headrace.mesh.checks.consumers import check_consumers, check_strangers
from headrace.mesh.checks.durability import check_replicas
from headrace.mesh.checks.host import check_files, check_volume
from headrace.mesh.checks.reading import Reading
from headrace.mesh.checks.server import check_clock, check_jetstream
from headrace.mesh.checks.start import check_start
from headrace.mesh.checks.stream_rules import STREAM_RULES, unknown_settings
from headrace.mesh.checks.streams import check_streams
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision, register_function
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings

pytestmark = pytest.mark.anyio

TASKS, RESULTS, JOBS, DEAD, FUNCTIONS = "HR_TASKS", "HR_RESULTS", "HR_JOBS", "HR_DEAD", "KV_HR_functions"
MAIL = "HR_MAIL"
HOUR = 3_600_000_000_000


def of(findings: list[Finding], check: str) -> Finding:
    """The one finding of a check."""
    (found,) = [f for f in findings if f.check == check]
    return found


def not_ok(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.state != "ok"]


async def remake(mesh: Mesh, stream: str, **changed: Any) -> None:
    """The stream again, with other settings."""
    config = {**next(s for s in mesh.topology.streams() if s.name == stream).config(), **changed}
    await jsapi.call(mesh, f"STREAM.DELETE.{stream}")
    await jsapi.call(mesh, f"STREAM.CREATE.{stream}", config)


# --- streams ----------------------------------------------------------------------------------------

STREAMS: dict[str, tuple[str, dict[str, Any], str, bool, tuple[str, ...], str]] = {
    # name: (stream, changed settings, state, no service starts, words in found, words in mend)
    "discard-old": (TASKS, {"discard": "old"}, "fail", True, ("discard is old", "drops"), "--discard new"),
    "discard-old-results": (RESULTS, {"discard": "old"}, "fail", True, ("discard is old",), "edit HR_RESULTS"),
    "max-age": (TASKS, {"max_age": HOUR}, "fail", True, ("max_age is 3600 s", "removed"), "--max-age 0ns"),
    "max-age-jobs": (JOBS, {"max_age": HOUR}, "fail", True, ("max_age is 3600 s",), "edit HR_JOBS"),
    "max-age-dead": (DEAD, {"max_age": HOUR}, "fail", True, ("max_age is 3600 s",), "edit HR_DEAD"),
    "max-age-functions": (FUNCTIONS, {"max_age": HOUR}, "fail", True, ("max_age is",), "edit KV_HR_functions"),
    "per-subject": (
        TASKS, {"max_msgs_per_subject": 5}, "fail", True,
        ("max_msgs_per_subject is 5", "in spite of discard: new"), "--max-msgs-per-subject -1",
    ),
    "per-subject-new": (
        TASKS, {"max_msgs_per_subject": 5, "discard_new_per_subject": True}, "fail", False,
        ("discard_new_per_subject is True", "refused"), "discard_new_per_subject: false",
    ),
    "mailbox-drops": (
        MAIL, {"discard_new_per_subject": False}, "fail", True,
        ("discard_new_per_subject is None", "tells nobody"), "discard_new_per_subject: true",
    ),
    "max-msgs": (TASKS, {"max_msgs": 5}, "fail", False, ("max_msgs is 5", "full"), "--max-msgs -1"),
    "max-msgs-old": (RESULTS, {"max_msgs": 5, "discard": "old"}, "fail", True, ("discard is old",), "discard: new"),
    "max-msg-size": (TASKS, {"max_msg_size": 100}, "fail", False, ("max_msg_size is 100",), "max_msg_size: -1"),
    "max-consumers": (TASKS, {"max_consumers": 2}, "fail", False, ("max_consumers is 2",), "max_consumers: -1"),
    "limits-queue": (TASKS, {"retention": "limits"}, "fail", True, ("retention is limits",), "nats stream rm HR_TASKS"),
    "interest-queue": (RESULTS, {"retention": "interest"}, "fail", True, ("retention is interest",), "workqueue"),
    "queue-log": (
        JOBS, {"retention": "workqueue"}, "fail", True, ("retention is workqueue", "once they are read"), "limits",
    ),
    "interest-log": (DEAD, {"retention": "interest"}, "fail", True, ("retention is interest",), "to be limits"),
    "no-ack": (TASKS, {"no_ack": True}, "fail", True, ("no_ack is True", "silence"), "no_ack: false"),
    "memory": (TASKS, {"storage": "memory"}, "fail", True, ("storage is memory", "restart"), "to be file"),
    "persist-async": (JOBS, {"persist_mode": "async"}, "fail", False, ("persist_mode is async",), "persist_mode"),
    "mirror": (
        JOBS, {"mirror": {"name": "ORIGIN"}, "subjects": []}, "fail", True, ("mirror is", "ORIGIN"), "no mirror",
    ),
    "sources": (TASKS, {"sources": [{"name": "ORIGIN"}]}, "fail", False, ("sources is", "ORIGIN"), "the sources"),
    "transform": (
        TASKS, {"subject_transform": {"src": "hr.tasks.>", "dest": "x.>"}}, "fail", True,
        ("subject_transform is", "no consumer finds them"), "remove the subject transform",
    ),
    "republish": (TASKS, {"republish": {"src": ">", "dest": "seen.>"}}, "warn", False, ("republish is",), "republish"),
    "deny-purge": (TASKS, {"deny_purge": True}, "fail", False, ("deny_purge is True", "cancelled"), "has to be false"),
    "leases-limit": (
        TASKS, {"consumer_limits": {"max_ack_pending": 5}}, "fail", False,
        ("consumer_limits.max_ack_pending is 5",), "remove consumer_limits.max_ack_pending",
    ),
    "idle-limit": (
        TASKS, {"consumer_limits": {"inactive_threshold": HOUR}}, "fail", False,
        ("consumer_limits.inactive_threshold is 3600 s",), "remove consumer_limits.inactive_threshold",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STREAMS)
async def test_a_stream_that_loses_or_refuses_work_is_found_and_refused(mesh: Mesh, case: str) -> None:
    stream, changed, state, stops, words, mend = STREAMS[case]
    await jsapi.call(mesh, "STREAM.CREATE.ORIGIN", {"name": "ORIGIN", "subjects": ["origin.>"]})
    await remake(mesh, stream, **changed)

    found = [f for f in not_ok(await check_streams(Reading(mesh))) if all(w in f.found for w in words)]
    assert [(f.check, f.state) for f in found] == [(f"stream {stream}", state)]
    assert mend in found[0].mend
    assert all(f.check == f"stream {stream}" for f in not_ok(await check_streams(Reading(mesh))))

    # `headrace init` refuses it, and names the setting; nothing is changed.
    setting = words[0].split()[0]
    if state == "fail":
        with pytest.raises(Conflict, match=setting) as drift:
            await provision(mesh)
        assert drift.value.code == "drift"
    else:
        await provision(mesh)

    # A service that works on it does not start where work would be lost, and starts elsewhere.
    if stops:
        with pytest.raises(Conflict, match=setting) as refused:
            await check_start(mesh, [stream])
        assert refused.value.code == "loses_work"
        assert stream in str(refused.value)
    else:
        await check_start(mesh, [stream])
    await check_start(mesh, [s.name for s in mesh.topology.streams() if s.name != stream])


async def test_a_sealed_stream_is_found_and_refused(mesh: Mesh) -> None:
    config = (await jsapi.stream_info(mesh, TASKS))["config"]
    await jsapi.call(mesh, f"STREAM.UPDATE.{TASKS}", {**config, "sealed": True})
    (found,) = not_ok(await check_streams(Reading(mesh)))
    assert (found.check, found.state) == ("stream HR_TASKS", "fail")
    assert "sealed is True" in found.found
    assert "nats stream rm HR_TASKS" in found.mend
    with pytest.raises(Conflict, match="sealed"):
        await provision(mesh)
    with pytest.raises(Conflict, match="sealed"):
        await check_start(mesh, [TASKS])


def test_every_rule_of_streams_has_a_case() -> None:
    tried = {case[4][0].split()[0] for case in STREAMS.values()} | {"sealed", "retention"}
    assert {rule.setting for rule in STREAM_RULES} <= tried


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"subjects": ["hr.tasks.one.>"]}, "subjects is ['hr.tasks.one.>']"),
        ({"allow_atomic": False}, "allow_atomic is"),
        ({"allow_rollup_hdrs": True}, "allow_rollup_hdrs is True"),
    ],
)
async def test_what_differs_otherwise_is_named_too(mesh: Mesh, changed: dict[str, Any], words: str) -> None:
    await remake(mesh, TASKS, **changed)
    (found,) = not_ok(await check_streams(Reading(mesh)))
    assert (found.check, found.state) == ("stream HR_TASKS", "fail")
    assert words in found.found


async def test_what_an_operator_may_choose_is_no_finding(mesh: Mesh) -> None:
    await remake(
        mesh, TASKS, compression="s2", max_bytes=1 << 30, metadata={"owner": "us"}, duplicate_window=HOUR
    )
    assert not_ok(await check_streams(Reading(mesh))) == []
    assert await provision(mesh) == []


async def test_a_setting_of_a_newer_server_is_told_as_unknown(mesh: Mesh) -> None:
    spec, config = mesh.topology.streams()[0], (await jsapi.stream_info(mesh, TASKS))["config"]
    assert unknown_settings(spec, config) == []
    assert unknown_settings(spec, {**config, "drops_on_sundays": True}) == ["drops_on_sundays is True"]


async def test_a_missing_stream_and_a_full_one(mesh: Mesh) -> None:
    await remake(mesh, TASKS, max_bytes=10_000)
    for i in range(100):
        try:
            await publish(mesh, TASKS, f"hr.tasks.f.normal.t6.j{i}", b"x" * 900)
        except jsapi.JetStreamError:
            break
    await jsapi.call(mesh, f"STREAM.DELETE.{JOBS}")
    full, missing = not_ok(await check_streams(Reading(mesh)))
    assert (full.check, full.state) == ("stream HR_TASKS", "warn")
    assert "of 10,000 bytes (max_bytes)" in full.found
    assert (missing.check, missing.state, missing.found, missing.mend) == (
        "stream HR_JOBS", "fail", "missing", "headrace init",
    )  # fmt: skip
    with pytest.raises(HeadraceError, match="HR_JOBS") as refused:
        await check_start(mesh, [TASKS, JOBS])
    assert refused.value.code == "streams_missing"


# --- consumers --------------------------------------------------------------------------------------

CONSUMERS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # name: (stream, changed settings, state, words in found, words in mend)
    "ack-none": (JOBS, {"ack_policy": "none", "max_ack_pending": 0}, "fail", "ack_policy is 'none'", "rm HR_JOBS"),
    "ack-all": (JOBS, {"ack_policy": "all"}, "fail", "ack_policy is 'all'", "consumer rm HR_JOBS completion"),
    "max-deliver": (RESULTS, {"max_deliver": 5}, "fail", "max_deliver is 5", "--max-deliver -1"),
    "inactive": (RESULTS, {"inactive_threshold": HOUR}, "fail", "inactive_threshold", "headrace init"),
    "headers-only": (RESULTS, {"headers_only": True}, "fail", "headers_only is True", "headrace init"),
    "backoff": (RESULTS, {"backoff": [10**9]}, "fail", "backoff is [1000000000]", "headrace init"),
    "priority": (
        RESULTS, {"priority_groups": ["a"], "priority_policy": "pinned_client"}, "fail", "priority_groups", "init",
    ),
    "max-batch": (RESULTS, {"max_batch": 5}, "fail", "max_batch is 5", "headrace init"),
    "max-expires": (RESULTS, {"max_expires": 10**9}, "fail", "max_expires is", "headrace init"),
    "max-bytes": (RESULTS, {"max_bytes": 100}, "fail", "max_bytes is 100", "headrace init"),
    "memory": (RESULTS, {"mem_storage": True}, "warn", "mem_storage is True", "consumer rm HR_RESULTS completion"),
    "push": (
        JOBS, {"deliver_subject": "pushed", "max_waiting": 0}, "fail", "deliver_subject is 'pushed'", "headrace init",
    ),
    "other-lease": (RESULTS, {"ack_wait": 10**9}, "fail", "ack_wait is 1000000000", "headrace init"),
    "other-filter": (RESULTS, {"filter_subject": "hr.results.job.x.>"}, "fail", "filter_subject is", "init"),
    "paused": (RESULTS, {"pause_until": "2099-01-01T00:00:00Z"}, "fail", "paused until 2099", "nats consumer resume"),
}  # fmt: skip


async def remake_consumer(mesh: Mesh, stream: str, **changed: Any) -> None:
    spec = next(c for c in mesh.topology.completion_consumers() if c.stream == stream)
    await jsapi.call(mesh, f"CONSUMER.DELETE.{stream}.{spec.durable}")
    config = {**spec.config(), **changed}
    body = {"stream_name": stream, "config": config, "action": "create"}
    await jsapi.call(mesh, f"CONSUMER.CREATE.{stream}.{spec.durable}.{config['filter_subject']}", body)


@pytest.mark.parametrize("case", CONSUMERS)
async def test_a_consumer_that_holds_up_or_loses_messages_is_found(mesh: Mesh, case: str) -> None:
    stream, changed, state, words, mend = CONSUMERS[case]
    await remake_consumer(mesh, stream, **changed)
    found = not_ok(await check_consumers(Reading(mesh)))
    assert all(f.check == f"consumer {stream}/completion" for f in found)
    assert [f.state for f in found if words in f.found and mend in f.mend] == [state], found
    if state == "fail" and case != "paused":
        with pytest.raises(Conflict, match=next(iter(changed))):
            await provision(mesh)
    else:
        await provision(mesh)


def test_every_rule_of_consumers_has_a_case() -> None:
    assert {rule.setting for rule in CONSUMER_RULES} <= {
        key for case in CONSUMERS.values() for key in case[1]
    }


async def test_sound_consumers_and_a_missing_one(mesh: Mesh) -> None:
    await register_function(mesh, FunctionSpec(name="generate", engine="echo", min_shape=6, max_shape=6))
    assert (await check_consumers(Reading(mesh)))[0].found == "13 present"
    await jsapi.call(mesh, f"CONSUMER.DELETE.{TASKS}.generate-bulk-t6")
    (found,) = await check_consumers(Reading(mesh))
    assert (found.state, found.found) == ("fail", "missing: HR_TASKS/generate-bulk-t6")
    assert "headrace init" in found.mend


# --- strangers --------------------------------------------------------------------------------------


async def test_no_strangers_in_a_mesh_alone(mesh: Mesh) -> None:
    await register_function(mesh, FunctionSpec(name="generate", engine="echo"))
    assert [f.found for f in await check_strangers(Reading(mesh))] == ["none"]
    # Consumers of a function that was forgotten without them are the mesh's own.
    bucket = mesh.topology.functions_bucket
    await publish(mesh, f"KV_{bucket}", f"$KV.{bucket}.generate", b"", headers={"KV-Operation": "DEL"})
    assert [f.found for f in await check_strangers(Reading(mesh))] == ["none"]


async def test_a_stream_over_the_front_door_is_named(mesh: Mesh) -> None:
    await jsapi.call(
        mesh, "STREAM.CREATE.EVERYTHING", {"name": "EVERYTHING", "subjects": ["hr.api.>"], "no_ack": True}
    )
    (found,) = await check_strangers(Reading(mesh))
    assert found.state == "fail"
    assert "stream EVERYTHING has hr.api.>: it answers requests in place of the services" in found.found


async def test_a_stream_in_place_of_ours_is_named(mesh: Mesh) -> None:
    await jsapi.call(mesh, f"STREAM.DELETE.{TASKS}")
    await jsapi.call(mesh, "STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["hr.tasks.>"]})
    (found,) = await check_strangers(Reading(mesh))
    assert found.state == "fail"
    assert "stream OTHER has hr.tasks.>: it takes work in place of the mesh's stream" in found.found
    assert "nats stream edit OTHER" in found.mend


async def test_a_consumer_that_takes_work_away_is_named(mesh: Mesh) -> None:
    config = {"durable_name": "thief", "ack_policy": "explicit", "filter_subject": "hr.tasks.manifest.>"}
    body = {"stream_name": TASKS, "config": config, "action": "create"}
    await jsapi.call(mesh, f"CONSUMER.CREATE.{TASKS}.thief.hr.tasks.manifest.>", body)
    (found,) = await check_strangers(Reading(mesh))
    assert found.state == "fail"
    assert "consumer thief on HR_TASKS takes hr.tasks.manifest.>" in found.found
    assert found.mend == "nats consumer rm HR_TASKS thief"


@pytest.mark.parametrize(
    "kind", [{"mirror": {"name": TASKS}}, {"sources": [{"name": TASKS}]}], ids=["mirror", "source"]
)
async def test_a_copy_of_a_queue_is_a_warning(mesh: Mesh, kind: dict[str, Any]) -> None:
    await jsapi.call(mesh, "STREAM.CREATE.COPY", {"name": "COPY", **kind})
    await publish(mesh, TASKS, "hr.tasks.f.normal.t6.j", b"{}")
    while not (await jsapi.stream_info(mesh, "COPY"))["state"]["messages"]:  # the copy has begun
        pass
    (found,) = await check_strangers(Reading(mesh))
    assert found.state == "warn"
    assert "stream COPY copies HR_TASKS" in found.found


# --- the server, its account, the machine ------------------------------------------------------------

LIMITS: dict[str, tuple[str, str, str, str]] = {
    # name: (limits of the account, state, words in found, words in mend)
    "streams": ("max_streams: 3", "fail", "max_streams: 3, and 19 are needed", "max_streams: 19"),
    "consumers": ("max_consumers: 5", "fail", "max_consumers: 5 in a stream", "max_consumers: 6"),
    "leases": (
        "max_ack_pending: 100",
        "fail",
        "max_ack_pending: 100: consumers that lease 100,000",
        "100000",
    ),
    "bounded": ("max_bytes_required: true", "fail", "max_bytes_required: true", "max_bytes_required: false"),
    "bytes": ("store_max_stream_bytes: 1000000000", "warn", "store_max_stream_bytes", "max_bytes"),
}


async def on_account(tmp_path: Path, jetstream: str, work: Any) -> None:
    """Run `work` on a broker whose account has these limits."""
    account = f"jetstream: {{{jetstream}}}," if jetstream else ""
    config = f"accounts {{ A: {{ {account} users: [{{user: u, password: hush}}] }} }}"
    server = NatsServer(tmp_path / "limited", durability="relaxed", extra_config=config)
    server.start()
    try:
        settings = Settings(
            url=server.url, dir=str(tmp_path), durability="relaxed", user="u", password="hush"
        )
        async with await Mesh.connect(settings, name="limited") as mesh:
            await work(mesh)
    finally:
        server.kill()


@pytest.mark.parametrize("case", LIMITS)
async def test_limits_of_the_account_that_refuse_work_are_named(tmp_path: Path, case: str) -> None:
    limits, state, words, mend = LIMITS[case]

    async def look(mesh: Mesh) -> None:
        try:
            await provision(mesh)
            await register_function(mesh, FunctionSpec(name="f", engine="echo", min_shape=6, max_shape=6))
        except HeadraceError:
            pass  # that is what the finding is about
        found = of(await check_jetstream(Reading(mesh)), "account limits")
        assert found.state == state
        assert words in found.found
        assert mend in found.mend

    await on_account(tmp_path, limits, look)


async def test_a_full_account_is_a_warning(tmp_path: Path) -> None:
    async def look(mesh: Mesh) -> None:
        await provision(mesh)
        for i in range(40):
            try:
                await publish(mesh, TASKS, f"hr.tasks.f.normal.t6.j{i}", b"x" * 5_000)
            except jsapi.JetStreamError:
                break
        found = of(await check_jetstream(Reading(mesh)), "jetstream")
        assert found.state == "warn"
        assert "max_store" in found.mend

    await on_account(tmp_path, "max_store: 100000", look)


async def test_jetstream_that_is_off_is_said_in_one_sentence(tmp_path: Path) -> None:
    async def look(mesh: Mesh) -> None:
        found = of(await check_jetstream(Reading(mesh)), "jetstream")
        assert found.state == "fail"
        with pytest.raises(HeadraceError, match="JetStream is off") as refused:
            await check_start(mesh, [TASKS])
        assert refused.value.code == "jetstream_off"

    await on_account(tmp_path, "", look)


async def test_a_sound_server(mesh: Mesh) -> None:
    assert not_ok(await check_jetstream(Reading(mesh))) == []
    assert of(await check_clock(mesh), "clock").state == "ok"


async def test_one_replica_is_told_apart_from_what_the_settings_want(mesh: Mesh, settings: Settings) -> None:
    found, single = await check_replicas(Reading(mesh))
    assert (found, single[:2]) == ([], [TASKS, RESULTS])
    mesh.settings = Settings(url=settings.url, replicas=3)
    found, _ = await check_replicas(Reading(mesh))
    assert "HR_TASKS has 1 replicas, the setting is replicas = 3" in found[0].found
    assert found[0].mend == "nats stream edit HR_TASKS --replicas 3"


def test_room_and_open_files(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "yet" / "there.duckdb"
    assert check_volume("disk", missing, "it stops").state in {"ok", "warn", "fail"}
    assert "GiB free of" in check_volume("disk", missing, "it stops").found
    few = check_files("open files", 256)
    assert (few.state, "ulimit -n" in few.mend) == ("warn", True)
    assert check_files("open files", 65_536).state == check_files("open files", -1).state == "ok"


# --- work that waits --------------------------------------------------------------------------------


async def test_tasks_that_wait_for_a_function_without_a_worker(mesh: Mesh) -> None:
    await register_function(mesh, FunctionSpec(name="generate", engine="echo", min_shape=6, max_shape=6))
    assert [(f.state, f.found) for f in await check_workers(Reading(mesh))] == [("warn", "none reports")]
    for i in range(3):
        await publish(mesh, TASKS, f"hr.tasks.generate.normal.t6.j{i}", b"{}")
    (found,) = await check_workers(Reading(mesh))
    assert (found.check, found.state) == ("workers of generate", "fail")
    assert "3 tasks of generate wait" in found.found
    assert found.mend == "headrace worker --function generate"


async def test_tasks_that_no_consumer_takes(mesh: Mesh) -> None:
    await register_function(mesh, FunctionSpec(name="generate", engine="echo", min_shape=6, max_shape=6))
    await publish(mesh, TASKS, "hr.tasks.manifest.j", b"{}")
    await publish(mesh, TASKS, "hr.tasks.generate.normal.t6.j", b"{}")
    assert [f.state for f in await check_stranded(Reading(mesh))] == ["ok"]
    await publish(mesh, TASKS, "hr.tasks.generate.normal.t9.j", b"{}")
    await publish(mesh, TASKS, "hr.tasks.other.bulk.t0.j", b"{}")
    await publish(mesh, TASKS, "hr.tasks.other.bulk.t0.k", b"{}")
    (found,) = await check_stranded(Reading(mesh))
    assert found.state == "fail"
    assert "2 of function other, bulk t0" in found.found
    assert "1 of function generate, normal t9" in found.found
    assert "headrace worker --function other" in found.mend


async def test_dead_letters_are_counted(mesh: Mesh) -> None:
    assert [f.state for f in await check_dead_letters(Reading(mesh))] == ["ok"]
    await publish(mesh, DEAD, "hr.dead.worker", b"{}")
    (found,) = await check_dead_letters(Reading(mesh))
    assert (found.state, found.found, found.mend) == ("warn", "1 messages", "headrace dead list")


def test_leases_that_workers_need() -> None:
    assert wanted_leases([64, 64]) == 192
    assert wanted_leases([1]) == 2
    assert wanted_leases([]) == 0
