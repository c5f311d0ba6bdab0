"""Governed calls from the command line, on a real mesh of two gateways and a callee that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.cli.harness import Up
from tests.gateway.callee_process import CalleeProcess
from tests.gateway.governed import COMMON, PRICE

ANSWER = [
    "call_id",
    "state",
    "attempt",
    "replayed",
    "outcome",
    "usage",
    "posted_micro",
    "held_micro",
    "error",
]
USAGE = ["input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "source"]
BUDGET = ["name", "tenant", "unit", "limit", "posted", "held", "held_in_doubt", "overrun"]
VERIFIED = ["records", "calls", "open", "in_doubt", "heads_match", "last_seq", "digest"]
HI = '{"messages":[{"role":"user","content":"hi"}]}'


class Governed:
    """The mesh, its callee, and shorter words for what is asked."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.callee = CalleeProcess(folder)
        common = COMMON.format(url=self.callee.url, timeout_s=3.0)
        parts = [f'[callees.{e}]\neffect = "{e}"\n{common}' for e in ("read", "money", "destructive")]
        parts.append(
            f'[callees.chat]\neffect = "cost_bearing"\n{common}{PRICE.replace("cost_bearing", "chat")}'
        )
        parts.append(f'[callees.careful]\neffect = "read"\napproval = true\n{common}')
        (folder / "headrace.toml").write_text("ack_wait_s = 2.0\n" + "\n".join(parts))
        self.folder = folder
        try:
            self.up = Up(folder, "--gateways", "2")
        except BaseException:
            self.callee.stop()
            raise

    def close(self) -> None:
        self.up.kill()
        self.callee.stop()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command from its arguments to its exit code, without a process of its own: there are many of them."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([*arguments, "--dir", str(self.folder)])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def json(self, *arguments: str) -> Any:
        """The decoded answer of a command that must succeed."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    def call(
        self, callee: str, *flags: str, key: str | None = None, body: str = HI, tenant: str = "t"
    ) -> tuple[int, dict[str, Any]]:
        """`headrace call … --json`: its exit code and its answer."""
        keyed = ("--key", key) if key else ()
        done = self.run(
            "call", callee, "--body", body, "--tenant", tenant, "--agent", "a", *keyed, *flags, "--json"
        )
        assert done.stdout.count("\n") == 1, done
        return done.returncode, json.loads(done.stdout)

    def in_doubt(self, key: str, tenant: str = "t") -> dict[str, Any]:
        """A call to the priced callee that is in doubt."""
        code, answer = self.call("chat", key=key, body=behaving("closes", key), tenant=tenant)
        assert (code, answer["state"]) == (6, "in_doubt")
        return answer

    def error(self, *arguments: str, code: int) -> dict[str, Any]:
        """The error of a command that must fail with `code`; its line for people names the same."""
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done
        error = json.loads(done.stdout)["error"]
        assert done.stderr == f"error: {error['message']}\n"
        return error

    def until(self, *arguments: str, is_so: Callable[[Any], Any]) -> Any:
        """Ask until the answer is as wanted: the data plane is a moment behind."""
        deadline = time.monotonic() + 30
        while not is_so(found := self.json(*arguments)):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found


def behaving(behave: str, name: str = "x", **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], "behave": behave, "id": name} | more)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Governed]:
    governed = Governed(tmp_path_factory.mktemp("calls") / "D")
    yield governed
    governed.close()


def api(up: Up, subject: str, body: Any) -> Any:
    """What `nats request SUBJECT BODY` prints."""

    async def ask() -> bytes:
        async with await Mesh.connect(Settings(url=up.url, dir=str(up.folder)), name="test") as connected:
            answer = await connected.request(subject, json.dumps(body).encode(), timeout_s=20)
            return answer.data

    return json.loads(asyncio.run(ask()))


# --- headrace call ------------------------------------------------------------------------------------


def test_completed_and_asked_again(mesh: Governed) -> None:
    code, first = mesh.call("chat", key="k1")
    assert (code, list(first), list(first["usage"])) == (0, ANSWER, USAGE)
    assert first["outcome"]["body"]["choices"][0]["message"]["content"] == "one two three"
    assert (first["state"], first["attempt"], first["replayed"], first["error"]) == (
        "completed",
        1,
        False,
        None,
    )
    assert (first["posted_micro"], first["held_micro"]) == (15, 0)
    assert first["usage"] == {
        "input_tokens": 11, "output_tokens": 4, "cached_tokens": 2, "reasoning_tokens": 0, "source": "provider",
    }  # fmt: skip
    code, again = mesh.call("chat", key="k1")
    assert (code, again) == (0, first | {"replayed": True})
    # The same by a raw request.
    body = {"callee": "chat", "body": json.loads(HI), "tenant": "t", "agent": "a", "key": "k1", "wait_s": 5}
    asked = api(mesh.up, "hr.api.call", body)
    assert asked == again
    assert list(asked) == ANSWER


def test_a_key_with_another_body(mesh: Governed) -> None:
    _, first = mesh.call("chat", key="k2")
    code, other = mesh.call("chat", key="k2", body=behaving("answers"))
    assert (code, other["state"], other["call_id"], list(other)) == (7, "conflict", first["call_id"], ANSWER)
    assert other["error"]["type"] == "key_reused"
    # The key belongs to its agent: of another one it is another call.
    done = mesh.run(
        "call",
        "chat",
        "--body",
        behaving("answers"),
        "--tenant",
        "t",
        "--agent",
        "b",
        "--key",
        "k2",
        "--json",
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["call_id"] != first["call_id"]


def test_refused_by_budget_callee_and_key(mesh: Governed) -> None:
    mesh.json("budget", "set", "none-left", "--tenant", "poor", "--unit", "calls", "--limit", "0")
    code, answer = mesh.call("chat", key="k3", tenant="poor")
    assert (code, answer["state"], list(answer)) == (5, "refused", ANSWER)
    assert answer["error"]["type"] == "over_budget"
    assert "budget none-left has 0 calls left and this call may take 1" in answer["error"]["message"]
    code, answer = mesh.call("nobody", key="k4")
    assert (code, answer["error"]["type"]) == (5, "unknown_callee")
    assert "chat" in answer["error"]["message"]
    code, answer = mesh.call("money")
    assert (code, answer["error"]["type"]) == (5, "key_required")
    # A refusal burns no key: with room it is made.
    mesh.json("budget", "set", "none-left", "--tenant", "poor", "--unit", "calls", "--limit", "1")
    assert mesh.call("chat", key="k3", tenant="poor")[0] == 0


def test_in_doubt_and_asked_again_it_is_not_made_again(mesh: Governed) -> None:
    answer = mesh.in_doubt("k5")
    assert list(answer) == ANSWER
    assert answer["held_micro"] > 0
    assert answer["error"]["type"]
    code, again = mesh.call("chat", key="k5", body=behaving("closes", "k5"))
    assert (code, again["state"], again["replayed"]) == (6, "in_doubt", True)
    assert [e["call"] for e in mesh.callee.entries()].count("k5") == 1


def test_still_in_progress(mesh: Governed) -> None:
    slow = behaving("late", "k6", delay=2.0)
    code, answer = mesh.call("chat", "--wait", "0.3", key="k6", body=slow)
    assert (code, answer["state"], list(answer)) == (8, "in_progress", ANSWER)
    code, done = mesh.call("chat", "--wait", "20", key="k6", body=slow)
    assert (code, done["state"], done["call_id"]) == (0, "completed", answer["call_id"])
    assert [e["call"] for e in mesh.callee.entries()].count("k6") == 1


def test_failed(mesh: Governed) -> None:
    code, answer = mesh.call("chat", key="k7", body=behaving("400"))
    assert (code, answer["state"], list(answer)) == (1, "failed", ANSWER)
    assert answer["error"]["status"] == 400
    assert "said 400" in answer["error"]["message"]
    assert (answer["posted_micro"], answer["held_micro"]) == (0, 0)


def test_bodies_of_a_file_and_of_standard_input(mesh: Governed, tmp_path: Path) -> None:
    path = tmp_path / "body.json"
    path.write_text(HI)
    _, by_text = mesh.call("chat", key="k8")
    code, by_file = mesh.call("chat", key="k8", body=f"@{path}")
    assert (code, by_file["call_id"], by_file["replayed"]) == (0, by_text["call_id"], True)
    done = mesh.up.run(
        "call", "chat", "--body", "-", "--tenant", "t", "--agent", "a", "--key", "k8", "--json", stdin=HI
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, by_file)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("chat", "--body", "{bad"), "--body is no JSON"),
        (("chat", "--body", "@/no/such"), "/no/such"),
        (("chat", "--body", HI, "--tenant", "a.b"), "'a.b'"),
        (("chat", "--body", HI, "--agent", "*"), "'*'"),
        (("c h", "--body", HI), "'c h'"),
        (("chat", "--body", HI, "--key", ""), "--key"),
    ],
)
def test_what_is_wrong_is_named(mesh: Governed, flags: tuple[str, ...], names: str) -> None:
    assert names in mesh.error("call", *flags, code=2)["message"]


def test_a_call_for_people(mesh: Governed) -> None:
    _, answer = mesh.call("chat", key="k9")
    done = mesh.up.run("call", "chat", "--body", HI, "--tenant", "t", "--agent", "a", "--key", "k9")
    assert done.returncode == 0
    assert answer["call_id"] in done.stdout
    assert re.search(r"state +│ completed", done.stdout)
    assert re.search(r"posted_micro +│ 15", done.stdout)


def test_generate_on_our_own_workers(mesh: Governed) -> None:
    code, answer = mesh.call("generate", key="g1", body='{"prompt":"Say hello.","max_tokens":8}')
    assert (code, answer["state"]) == (0, "completed")
    assert answer["outcome"]["body"]["choices"][0]["text"] == "Say hello."
    code, again = mesh.call("generate", key="g1", body='{"prompt":"Say hello.","max_tokens":8}')
    assert (code, again["replayed"]) == (0, True)


@pytest.mark.slow
def test_a_mesh_without_callees_still_has_generate(tmp_path: Path) -> None:
    up = Up(tmp_path / "D", engine="sim")
    try:
        done = up.run("call", "generate", "--body", '{"prompt":"hello there","max_tokens":8}', "--json")
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["state"]) == (0, "completed"), done
        assert answer["usage"]["output_tokens"] > 0
        listed = up.json("calls", "show", answer["call_id"])
        assert [r["type"] for r in listed["records"]] == ["intent", "completed"]
    finally:
        up.kill()


# --- headrace calls -----------------------------------------------------------------------------------


def test_list_and_show(mesh: Governed) -> None:
    doubtful = mesh.in_doubt("l1", tenant="lists")
    _, fine = mesh.call("chat", key="l2", tenant="lists")
    both = {doubtful["call_id"], fine["call_id"]}
    rows = mesh.until(
        "calls", "list", "--tenant", "lists", is_so=lambda rows: {r["call_id"] for r in rows} == both
    )
    assert rows[0]["call_id"] == fine["call_id"]  # the newest first
    assert (rows[0]["state"], rows[0]["posted_micro"], rows[0]["agent"]) == ("completed", 15, "a")
    [row] = mesh.json("calls", "list", "--tenant", "lists", "--state", "in_doubt")
    assert (row["call_id"], row["held_micro"]) == (doubtful["call_id"], doubtful["held_micro"])
    assert len(mesh.json("calls", "list", "--tenant", "lists", "--limit", "1")) == 1
    assert mesh.json("calls", "list", "--tenant", "nobody") == []
    assert mesh.json("calls", "list", "--tenant", "lists", "--state", "in_progress") == []
    assert "'lost'" in mesh.error("calls", "list", "--state", "lost", code=2)["message"]
    # Piped, each call is one line with its whole id.
    done = mesh.up.run("calls", "list", "--tenant", "lists")
    for call in both:
        assert sum(call in line for line in done.stdout.splitlines()) == 1, done.stdout
    found = mesh.json("calls", "show", doubtful["call_id"])
    assert [r["type"] for r in found["records"]] == ["intent", "in_doubt"]
    assert (found["call_id"], found["tenant"], found["state"]) == (doubtful["call_id"], "lists", "in_doubt")
    assert found["held_micro"] == doubtful["held_micro"] > 0
    shown = mesh.run("calls", "show", doubtful["call_id"]).stdout
    assert shown.index("intent") < shown.index("in_doubt", shown.index("intent"))
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", shown)


def test_a_call_that_is_not_there(mesh: Governed) -> None:
    _, fine = mesh.call("chat", key="l3")
    for command in (
        ("show", "nope"),
        ("show", "nope", "--tenant", "t"),
        ("show", fine["call_id"], "--tenant", "other"),
        ("resolve", "nope", "applied", "--why", "x"),
        ("resolve", "nope", "applied", "--why", "x", "--tenant", "t"),
        ("approve", "nope"),
        ("deny", "nope", "--why", "x"),
    ):
        error = mesh.error("calls", *command, code=4)
        assert error["code"] == "unknown_call"
        assert f"'{command[1]}'" in error["message"]


def test_resolve_applied_with_its_cost(mesh: Governed) -> None:
    mesh.json("budget", "set", "money", "--tenant", "res", "--unit", "micro", "--limit", "100000")
    doubt = mesh.in_doubt("r1", tenant="res")
    [budget] = mesh.json("budget", "show", "--tenant", "res")
    held = doubt["held_micro"]
    assert (budget["held"], budget["held_in_doubt"], budget["posted"]) == (held, held, 0)
    done = mesh.json(
        "calls",
        "resolve",
        doubt["call_id"],
        "applied",
        "--cost-micro",
        "12",
        "--why",
        "the invoice has it",
        "--by",
        "ann",
    )
    assert list(done) == ANSWER
    assert (done["state"], done["posted_micro"], done["held_micro"]) == ("completed", 12, 0)
    [budget] = mesh.json("budget", "show", "--tenant", "res")
    assert (budget["held"], budget["held_in_doubt"], budget["posted"], budget["overrun"]) == (0, 0, 12, 0)
    found = mesh.json("calls", "show", doubt["call_id"])
    assert [r["type"] for r in found["records"]] == ["intent", "in_doubt", "completed"]
    assert found["records"][-1]["resolved_by"] == "operator ann"
    assert found["records"][-1]["why"] == "the invoice has it"
    assert [(e["kind"], e["by"], e["why"]) for e in found["evidence"]] == [
        ("operator", "ann", "the invoice has it")
    ]
    # A second word about it is refused, and says whose the first was.
    error = mesh.error("calls", "resolve", doubt["call_id"], "not-applied", "--why", "no", code=1)
    assert error["code"] == "not_in_doubt"
    assert doubt["call_id"] in error["message"]
    assert "operator ann" in error["message"]
    assert mesh.json("calls", "show", doubt["call_id"])["evidence"] == found["evidence"]
    # Its caller hears of it.
    code, again = mesh.call("chat", key="r1", body=behaving("closes", "r1"), tenant="res")
    assert (code, again["state"], again["posted_micro"], again["replayed"]) == (0, "completed", 12, True)
    [row] = mesh.until("calls", "list", "--tenant", "res", is_so=lambda rows: rows[0]["state"] == "completed")
    assert (row["resolved_by"], row["posted_micro"]) == ("operator ann", 12)


def test_resolve_not_applied_lets_the_key_try_again(mesh: Governed) -> None:
    doubt = mesh.in_doubt("r2", tenant="res2")
    done = mesh.json("calls", "resolve", doubt["call_id"], "not-applied", "--why", "they have no such call")
    assert (done["state"], done["posted_micro"], done["held_micro"]) == ("failed", 0, 0)
    code, again = mesh.call("chat", key="r2", body=behaving("closes", "r2"), tenant="res2")
    assert (code, again["state"], again["attempt"]) == (6, "in_doubt", 2)
    # What was not done and was charged all the same is not made again.
    paid = mesh.json(
        "calls", "resolve", again["call_id"], "not-applied", "--cost-micro", "7", "--why", "billed anyway"
    )
    assert (paid["state"], paid["posted_micro"]) == ("failed", 7)
    code, last = mesh.call("chat", key="r2", body=behaving("closes", "r2"), tenant="res2")
    assert (code, last["state"], last["attempt"], last["replayed"]) == (1, "failed", 2, True)


def test_resolve_what_is_over_and_in_wrong_words(mesh: Governed) -> None:
    _, fine = mesh.call("chat", key="r3")
    error = mesh.error("calls", "resolve", fine["call_id"], "applied", "--why", "x", code=1)
    assert error["code"] == "not_in_doubt"
    assert "completed" in error["message"]
    assert (
        "--why" in mesh.error("calls", "resolve", fine["call_id"], "applied", "--why", " ", code=2)["message"]
    )
    for wrong in (("maybe", "--why", "x"), ("applied",), ("applied", "--why", "x", "--cost-micro", "-1")):
        assert mesh.run("calls", "resolve", fine["call_id"], *wrong).returncode == 2


def test_approve_and_deny(mesh: Governed) -> None:
    code, waiting = mesh.call("careful", "--wait", "1", key="a1")
    assert (code, waiting["state"], list(waiting)) == (8, "awaiting_approval", ANSWER)
    [row] = mesh.json("calls", "list", "--state", "awaiting_approval", "--tenant", "t")
    assert row["call_id"] == waiting["call_id"]
    mesh.json("calls", "approve", waiting["call_id"], "--why", "fine", "--by", "ann")
    code, done = mesh.call("careful", "--wait", "20", key="a1")
    assert (code, done["state"], done["call_id"]) == (0, "completed", waiting["call_id"])
    said = mesh.json("calls", "show", waiting["call_id"])["evidence"]
    assert ("approved", "ann", "fine") in [(e["kind"], e.get("by"), e.get("why")) for e in said]
    _, waiting = mesh.call("careful", "--wait", "1", key="a2")
    mesh.json("calls", "deny", waiting["call_id"], "--why", "not today", "--by", "ann")
    code, denied = mesh.call("careful", "--wait", "20", key="a2")
    assert (code, denied["state"]) == (5, "refused")
    assert mesh.error("calls", "approve", waiting["call_id"], code=1)["message"]
    assert mesh.run("calls", "deny", waiting["call_id"]).returncode == 2  # says no reason


# --- headrace budget ----------------------------------------------------------------------------------


def test_budgets(mesh: Governed) -> None:
    made = mesh.json(
        "budget", "set", "daily", "--tenant", "b", "--unit", "tokens", "--limit", "500", "--period", "day"
    )
    assert list(made)[: len(BUDGET)] == BUDGET
    assert (made["name"], made["tenant"], made["unit"], made["limit"], made["posted"]) == (
        "daily",
        "b",
        "tokens",
        500,
        0,
    )
    mesh.json("budget", "set", "mine", "--tenant", "b", "--agent", "a", "--unit", "calls", "--limit", "3")
    mesh.json("budget", "set", "others", "--tenant", "b", "--agent", "z", "--unit", "calls", "--limit", "0")
    assert mesh.call("chat", key="b1", tenant="b")[0] == 0  # agent z's budget is none of a's
    rows = {row["name"]: row for row in mesh.json("budget", "show", "--tenant", "b")}
    assert {name: (row["posted"], row["held"]) for name, row in rows.items()} == {
        "daily": (15, 0), "mine": (1, 0), "others": (0, 0),
    }  # fmt: skip
    # Another limit, lower than what is spent: it admits nothing, and loses nothing.
    changed = mesh.json(
        "budget", "set", "mine", "--tenant", "b", "--agent", "a", "--unit", "calls", "--limit", "1"
    )
    assert (changed["limit"], changed["posted"]) == (1, 1)
    assert mesh.call("chat", key="b2", tenant="b")[0] == 5
    every = mesh.json("budget", "show")
    assert {("b", "daily"), ("b", "mine")} <= {(row["tenant"], row["name"]) for row in every}
    assert mesh.json("budget", "show", "mine", "--tenant", "b") == [changed]
    assert mesh.error("budget", "show", "nope", code=4)["code"] == "unknown_budget"
    assert mesh.json("budget", "show", "--tenant", "nobody") == []
    error = mesh.error(
        "budget", "set", "mine", "--tenant", "b", "--agent", "a", "--unit", "tokens", "--limit", "9", code=1
    )
    assert "mine" in error["message"]
    shown = mesh.up.run("budget", "show", "--tenant", "b").stdout
    assert re.search(r"daily +│ b +│ tokens +│ +500 │ +15", shown), shown
    for wrong in (
        ("x", "--unit", "euros", "--limit", "1"),
        ("x", "--unit", "calls", "--limit", "-1"),
        ("x", "--unit", "calls"),
        ("x", "--unit", "calls", "--limit", "1", "--period", "week"),
        ("x.y", "--unit", "calls", "--limit", "1"),
        ("x", "--unit", "calls", "--limit", "1", "--tenant", "*"),
    ):
        assert mesh.run("budget", "set", *wrong).returncode == 2, wrong


def test_a_budget_holds_however_it_is_asked(mesh: Governed) -> None:
    mesh.json("budget", "set", "two", "--tenant", "both", "--unit", "calls", "--limit", "2")
    body = {"callee": "chat", "body": json.loads(HI), "tenant": "both", "agent": "a", "wait_s": 5}
    assert api(mesh.up, "hr.api.call", body | {"key": "1"})["state"] == "completed"
    assert mesh.call("chat", key="2", tenant="both")[0] == 0
    assert mesh.call("chat", key="3", tenant="both")[0] == 5
    assert api(mesh.up, "hr.api.call", body | {"key": "3"})["state"] == "refused"


# --- the whole ----------------------------------------------------------------------------------------


def test_verify_and_rebuild(mesh: Governed) -> None:
    mesh.in_doubt("v1", tenant="v")
    found = mesh.json("ledger", "verify")
    assert list(found) == VERIFIED
    assert found["heads_match"]
    assert found["records"] == found["last_seq"] > 0
    assert found["in_doubt"] >= 1
    assert found["open"] == 0
    assert mesh.json("ledger", "verify") == found
    assert api(mesh.up, "hr.api.ledger.verify", {}) == found
    mesh.call("chat", key="v2", tenant="v")
    more = mesh.json("ledger", "verify")
    assert more["last_seq"] > found["last_seq"]
    assert more["digest"] != found["digest"]
    shown = mesh.up.run("ledger", "verify")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert more["digest"] in shown.stdout
    assert mesh.json("rebuild") == {
        "records": more["records"], "identical": True, "unreadable": 0,
        "tables": {"call_records": 0, "budget_heads": 0},
    }  # fmt: skip
    assert "identical" in mesh.run("rebuild").stderr


def test_a_gateway_that_is_killed_changes_nothing_for_who_asks(mesh: Governed) -> None:
    mesh.up.kill_service("gateway")
    code, answer = mesh.call("chat", key="z1")
    assert (code, answer["state"]) == (0, "completed")
    mesh.up.kill_service("gateway-2")
    code, again = mesh.call("chat", key="z1")
    assert (code, again["replayed"]) == (0, True)
    assert mesh.json("ledger", "verify")["heads_match"]
