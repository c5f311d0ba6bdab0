"""Cases that users of gateways reported, in real processes: each is named in docs/cases.md by its number."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import Conflict, HeadraceError, Unavailable
from headrace.contracts.ledger import Effect
from headrace.gateway.book import Book
from headrace.gateway.budgets import Budgets
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import Entry, StreamLedger
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from tests.chaos.processes import Part
from tests.cli.harness import HEADRACE, clean_environment
from tests.completion.ledger import projected
from tests.completion.world import sql
from tests.gateway.fleet import HI, Fleet
from tests.gateway.invariants import KEYED, Again, check
from tests.gateway.test_book import intent, one

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@contextmanager
def fleet_of(server: NatsServer, mesh: Mesh, folder: Path, **options: Any) -> Iterator[Fleet]:
    fleet = Fleet(server, mesh, folder / "m", **options)
    try:
        yield fleet
    except BaseException:
        print(fleet.logs())
        raise
    finally:
        fleet.stop()


@pytest.fixture
def fleet(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(nats_server, mesh, tmp_path) as found:
        yield found


def id_of(key: str) -> str:
    return call_id("t", "a", key)


def names_of(effect: Effect, keys: Sequence[str]) -> dict[str, str]:
    """The callee's names of these calls."""
    return {id_of(key): f"hr-{id_of(key)}" if effect in KEYED else key for key in keys}


async def told(fleet: Fleet, effect: Effect, key: str, **body: Any) -> CallAnswer:
    """The answer, asked for until there is one that is no mere progress."""
    answer = None
    while answer is None or answer.state == "in_progress":
        answer = await fleet.ask(effect, key, {**HI, "id": key, **body}, wait_s=2.0)
    return answer


async def test_g1_sigterm_right_after_the_last_answer_loses_no_record(fleet: Fleet) -> None:
    """200 calls, 200 completions, 200 rows."""
    keys = [f"k{n}" for n in range(200)]
    await Budgets(StreamLedger(fleet.mesh)).set("t", "calls", unit="calls", limit=200)
    await fleet.mend()
    answers = await asyncio.gather(
        *(fleet.ask("cost_bearing", k, {**HI, "id": k}, wait_s=60.0) for k in keys)
    )
    (gateway,) = fleet.gateways
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    assert await gateway.died(30) == 0, gateway.tail()
    assert [a and a.state for a in answers] == ["completed"] * 200
    fold = await fleet.fold()
    assert [view.state for view in fold.calls.values()] == ["completed"] * 200
    check(await fleet.witness(names_of("cost_bearing", keys)))
    completion = Part("completion", gateway.log.parent)
    completion.start()
    try:
        await completion.ready()
        await projected(fleet.mesh)
        assert await sql(fleet.mesh, "SELECT state, count(*) FROM calls GROUP BY state") == [
            ["completed", 200]
        ]
    finally:
        completion.kill()


async def test_g3_a_stored_outcome_read_five_times_is_one_charge(fleet: Fleet) -> None:
    await Budgets(StreamLedger(fleet.mesh)).set("t", "micro", unit="micro", limit=10**6)
    await fleet.mend()
    first = await told(fleet, "cost_bearing", "k")
    again = await asyncio.gather(*(told(fleet, "cost_bearing", "k") for _ in range(5)))
    assert (first.state, first.replayed, first.posted_micro > 0) == ("completed", False, True)
    assert {(a.state, a.replayed, a.posted_micro, str(a.outcome)) for a in again} == {
        ("completed", True, first.posted_micro, str(first.outcome))
    }
    head = (await fleet.fold()).heads["t", "micro"].periods[""]
    assert (head.posted, head.held) == (first.posted_micro, 0)
    assert fleet.heard() == ["k"]


@pytest.mark.parametrize("behave", ["stream", "cuts"])
async def test_g4_a_caller_that_leaves_in_mid_stream_leaves_a_terminal_with_usage(
    fleet: Fleet, behave: str
) -> None:
    """The stream is read to its end without a caller; where it breaks, what came is posted as partial."""
    await fleet.mend()
    body = {**HI, "id": "k", "behave": behave, "stream": True, "pause": 0.3}
    answer = await fleet.ask("cost_bearing", "k", body, wait_s=0.3)
    assert answer is not None
    assert answer.state == "in_progress"
    await fleet.until(lambda: at_rest(fleet))
    view = (await fleet.fold()).calls["t", id_of("k")]
    end: Any = view.last.end
    assert view.state == "completed"
    assert end.outcome.partial is (behave == "cuts")
    assert (end.usage.source, end.usage.output_tokens) == (
        ("estimated", 4) if behave == "cuts" else ("provider", 4)
    )
    assert end.cost_micro > 0
    check(await fleet.witness(names_of("cost_bearing", ["k"])))


async def test_g5_after_a_crash_between_intent_and_call_only_what_is_in_doubt_is_held(fleet: Fleet) -> None:
    """100 calls, half of them with an intent and not yet called when the gateway dies."""
    await Budgets(StreamLedger(fleet.mesh)).set("t", "calls", unit="calls", limit=1_000)
    (gateway,) = fleet.gateways
    gateway.start(crash_at="intent-acked:50:hold")
    await gateway.ready()
    effects: tuple[Effect, ...] = ("cost_bearing", "read")
    keys = [(effects[n % 2], f"k{n}") for n in range(100)]
    asking = [asyncio.create_task(fleet.ask(e, k, {**HI, "id": k}, wait_s=1.0)) for e, k in keys]
    assert await gateway.died(30) == -signal.SIGKILL
    before = await fleet.fold()
    assert len(before.calls) >= 50
    assert before.accounts["t", "calls"][""].held == len(before.calls)
    assert fleet.heard() == []
    await fleet.mend()
    await fleet.until(lambda: at_rest(fleet))
    await asyncio.gather(*asking)
    fold = await fleet.fold()
    account = fold.heads["t", "calls"].periods[""]
    doubtful = [v for v in fold.calls.values() if v.state == "in_doubt"]
    assert account.held == account.in_doubt == len(doubtful) >= 20
    assert account.posted == len(fold.calls) - len(doubtful)
    check(await fleet.witness({id_of(k): k for _, k in keys}))


async def test_g7_a_gateway_cut_off_from_the_broker_admits_nothing(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    """Only what had its intent already is heard while the broker is away; the rest once it is back."""
    with fleet_of(nats_server, mesh, tmp_path, settings="concurrency = 5\n") as fleet:
        await fleet.mend()
        keys = [f"k{n}" for n in range(40)]
        body = {**HI, "behave": "late", "delay": 0.3}
        asking = [
            asyncio.create_task(fleet.ask("cost_bearing", k, {**body, "id": k}, wait_s=1.0)) for k in keys
        ]
        await fleet.until(lambda: len(fleet.heard()) >= 5)
        nats_server.kill()
        heard = len(fleet.heard())
        await asyncio.sleep(2.0)  # several times what five further calls would take
        assert len(fleet.heard()) <= heard + 5 < 40
        await asyncio.to_thread(nats_server.restart)
        await fleet.until(lambda: mesh.connected)
        await fleet.until(lambda: at_rest(fleet))
        await asyncio.gather(*asking)
        fold = await fleet.fold()
        assert {view.state for view in fold.calls.values()} == {"completed"}
        check(await fleet.witness(names_of("cost_bearing", keys)))


async def test_g8_a_call_in_doubt_is_known_within_the_restart(fleet: Fleet) -> None:
    """Killed in mid-call, started again, the key asked again: in doubt at once, and no second call."""
    await fleet.mend()
    asking = asyncio.create_task(
        fleet.ask("cost_bearing", "k", {**HI, "id": "k", "behave": "hangs"}, wait_s=1.0)
    )
    await fleet.until(lambda: fleet.heard() == ["k"])
    fleet.gateways[0].kill()
    await fleet.mend()
    view = (await fleet.fold()).calls["t", id_of("k")]
    assert view.state == "in_doubt"  # a gateway that is ready has decided
    answer = await told(fleet, "cost_bearing", "k", behave="hangs")
    assert (answer.state, answer.held_micro > 0, answer.replayed) == ("in_doubt", True, True)
    assert fleet.heard() == ["k"]
    await asyncio.gather(asking)
    check(await fleet.witness(names_of("cost_bearing", ["k"])))


class LosesAnswers(StreamLedger):
    """The real stream, whose first answer to an append never comes."""

    lost = 0

    async def append(self, entries: Sequence[Entry]) -> list[int]:
        found = await super().append(entries)
        if not self.lost:
            self.lost += 1
            msg = "no answer came"
            raise Unavailable(msg)
        return found


async def test_g9_a_lost_puback_is_recognised_and_the_record_stands_once(mesh: Mesh) -> None:
    """What is sent again is refused by its sequence; the record that stands is found to be our own."""
    await Budgets(StreamLedger(mesh)).set("t", "b", unit="calls", limit=1)
    ledger = LosesAnswers(mesh)
    seq = await Book(ledger).write(intent("c", one()), None, 0, patience_s=30.0)
    stored = await ledger.call("t", "c")
    head = await ledger.head("t", "b")
    assert ledger.lost == 1
    assert (stored.records, stored.seq) == ([intent("c", one())], seq)
    assert head is not None
    assert (head.head.periods[""].held, head.seq) == (1, seq + 1)


async def test_g9_killed_before_the_puback_is_seen_there_is_one_call(fleet: Fleet) -> None:
    """The intent is stored and nobody knows: the next life tells from the ledger, and calls as the effect allows."""
    (gateway,) = fleet.gateways
    gateway.start(crash_at="intent-stored")
    await gateway.ready()
    asking = asyncio.create_task(fleet.ask("idempotent", "k", {**HI, "id": "k"}, wait_s=1.0))
    assert await gateway.died(30) == -signal.SIGKILL
    await fleet.mend()
    assert (await told(fleet, "idempotent", "k")).state == "completed"
    assert len(fleet.heard()) == 1
    await asyncio.gather(asking)
    check(await fleet.witness(names_of("idempotent", ["k"])))


async def test_g10_an_agent_that_restarts_asks_by_the_same_key_and_the_callee_counts_one(
    fleet: Fleet,
) -> None:
    """It is killed while its call is under way, and asks again for the same step of the same message."""
    await fleet.mend()
    body = json.dumps({**HI, "id": "k", "behave": "late", "delay": 1.0})
    command = [*HEADRACE, "call", "cost_bearing", "--body", body, "--tenant", "t", "--agent", "a", "--key", "m-1:3",
               "--json", "--dir", str(fleet.gateways[0].log.parent)]  # fmt: skip

    def step() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )

    first = step()
    await fleet.until(lambda: fleet.heard() == ["k"])
    first.kill()
    first.wait()
    second = step()
    out, _ = await asyncio.to_thread(second.communicate, timeout=60)
    assert second.returncode == 0
    answer = json.loads(out)
    assert (answer["state"], answer["call_id"]) == ("completed", id_of("m-1:3"))
    assert fleet.heard() == ["k"]
    check(await fleet.witness({id_of("m-1:3"): "k"}))


@pytest.mark.parametrize("effect", ["cost_bearing", "destructive"])
async def test_g11_a_callee_that_closes_after_reading_is_asked_once(fleet: Fleet, effect: Effect) -> None:
    """No client below retries by itself; the call is in doubt, and stays so when it is asked for again."""
    await fleet.mend()
    answers = [await told(fleet, effect, "k", behave="closes") for _ in range(2)]
    assert [a.state for a in answers] == ["in_doubt", "in_doubt"]
    names = names_of(effect, ["k"])
    assert fleet.heard() == list(names.values())
    other = await told(fleet, effect, "k", behave="closes", more="another body")
    again = [
        Again(id_of("k"), False, "in_doubt", answers[1], 1, len(fleet.heard())),
        Again(id_of("k"), True, "in_doubt", other, 1, len(fleet.heard())),
    ]
    check(await fleet.witness(names, again=again))


async def test_g12_a_gateway_stopped_past_its_lease_is_fenced(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    """One call; the late result is evidence, not a second terminal, and what was in doubt is completed from it."""
    with fleet_of(nats_server, mesh, tmp_path, timeout_s=1.0) as fleet:
        await fleet.mend()
        late = {"behave": "late", "delay": 0.5}
        asking = asyncio.create_task(fleet.ask("cost_bearing", "k", {**HI, "id": "k", **late}, wait_s=1.0))
        await fleet.until(lambda: fleet.heard() == ["k"])
        stopped = fleet.gateways[0].process
        assert stopped is not None
        stopped.send_signal(signal.SIGSTOP)
        fleet.gateways.append(fleet.gateway("g2"))
        try:
            await fleet.mend()

            async def is_in(state: str) -> bool:
                return (await fleet.fold()).calls["t", id_of("k")].state == state

            await fleet.until(lambda: is_in("in_doubt"))
            stopped.send_signal(signal.SIGCONT)
            await fleet.until(lambda: is_in("completed"))
        finally:
            stopped.send_signal(signal.SIGCONT)
        done = await told(fleet, "cost_bearing", "k", **late)
        assert (done.state, done.replayed) == ("completed", True)
        end: Any = (await fleet.fold()).calls["t", id_of("k")].last.end
        assert end.resolved_by == "evidence"
        assert fleet.heard() == ["k"]
        await asyncio.gather(asking)
        counts = check(await fleet.witness(names_of("cost_bearing", ["k"])))
        assert counts[13] == 1


async def test_g14_killed_directly_after_the_accept_the_request_is_there(fleet: Fleet) -> None:
    """Nobody was told of an accept before its PubAck; what was accepted is made by the next life."""
    (gateway,) = fleet.gateways
    gateway.start(crash_at="call-accepted")
    await gateway.ready()
    asking = asyncio.create_task(fleet.ask("money", "k", {**HI, "id": "k"}, wait_s=1.0))
    assert await gateway.died(30) == -signal.SIGKILL
    waiting = (await jsapi.stream_info(fleet.mesh, fleet.mesh.topology.calls))["state"]["messages"]
    assert waiting == 1 or (await fleet.fold()).calls
    await fleet.mend()
    await fleet.until(lambda: at_rest(fleet))
    assert await asyncio.gather(asking) == [None]
    assert {v.state for v in (await fleet.fold()).calls.values()} <= {"completed", "in_doubt"}
    assert (await told(fleet, "money", "k")).state == "completed"  # by the call itself, or by its resolver
    assert len(fleet.heard()) == 1
    check(await fleet.witness(names_of("money", ["k"])))


@pytest.mark.parametrize("verdict", ["applied", "not-applied"])
async def test_an_operators_word_that_a_crash_cut_short_is_said_again(fleet: Fleet, verdict: str) -> None:
    """Killed between the note and the record: the call is in doubt as before, and is decided once."""
    await Budgets(StreamLedger(fleet.mesh)).set("t", "micro", unit="micro", limit=10**6)
    (gateway,) = fleet.gateways
    gateway.start(crash_at="operator-noted")
    await gateway.ready()
    behave = "closes" if verdict == "applied" else "closes before reading"
    assert (await told(fleet, "cost_bearing", "k", behave=behave)).state == "in_doubt"
    word = {"call": id_of("k"), "tenant": "t", "verdict": verdict, "why": "I asked them"}
    with pytest.raises(HeadraceError):
        await call_api(fleet.mesh, "calls.resolve", word, timeout_s=2.0)
    assert await gateway.died(30) == -signal.SIGKILL
    await fleet.mend()
    assert (await fleet.fold()).calls["t", id_of("k")].state == "in_doubt"
    await call_api(fleet.mesh, "calls.resolve", word, timeout_s=20.0)
    with pytest.raises(Conflict):
        await call_api(fleet.mesh, "calls.resolve", word, timeout_s=20.0)
    view = (await fleet.fold()).calls["t", id_of("k")]
    assert view.state == ("completed" if verdict == "applied" else "failed")
    assert [e.kind for e in await fleet.evidence()].count("operator") == 2
    head = (await fleet.fold()).heads["t", "micro"].periods[""]
    assert (head.held, head.posted > 0) == (0, verdict == "applied")


async def at_rest(fleet: Fleet) -> bool:
    """Whether no request waits, and no call is open."""
    state = (await jsapi.stream_info(fleet.mesh, fleet.mesh.topology.calls))["state"]
    fold = await fleet.fold()
    return not state["messages"] and all(v.terminal or v.state == "in_doubt" for v in fold.calls.values())
