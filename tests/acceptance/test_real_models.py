"""End to end through real engines: a job through vLLM on the CPU, and one through llama.cpp."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.inference_worker.engines import weights
from tests.cli.harness import Up, headrace


@pytest.fixture(scope="module")
def vllm_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A mesh whose worker runs vLLM on the tiny model."""
    from tests.models.tiny_llama import make_tiny_llama  # needs transformers, which comes with vLLM

    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("mesh") / "D"
    up = Up(folder, "--model", str(model), "--context", "256", engine="vllm")
    yield up
    assert up.stop() == 0
    assert up.leftovers() == []


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["client", "worker"])
def test_a_job_through_vllm(vllm_mesh: Up, tmp_path: Path, where: str) -> None:
    lines: list[dict[str, Any]] = [
        {
            "custom_id": f"chat-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"item {i}"}],
                "max_tokens": 4 + i % 13,
                "seed": i,
            },
        }
        for i in range(60)
    ]
    lines += [
        {"prompt": "plain text", "max_tokens": 5, "n": 2, "temperature": 0.7, "seed": 1},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 5, "temperature": 0.0},
        {"prompt": "x" * 4_000, "max_tokens": 5},
        {"prompt": "choose", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8},
        {"prompt": "broken", "structured_outputs": {"regex": "(("}, "max_tokens": 8},
    ]
    path = tmp_path / "job.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    job = f"real-{where}"
    up = vllm_mesh
    receipt = up.json("submit", str(path), "--job", job, "--tokenise", where)
    assert receipt["submitted"] == len(lines)
    assert up.run("watch", job, "--timeout", "120", timeout=150).returncode == 3
    audit = up.json("audit", job)
    assert (audit["ok"], audit["failed"], audit["balanced"]) == (63, 2, True)
    out = tmp_path / "results.jsonl"
    assert up.run("results", job, "--format", "jsonl", "--out", str(out)).returncode == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["index"] for r in results] == list(range(len(lines)))
    for i in range(60):
        assert 1 <= results[i]["usage"]["completion_tokens"] <= 4 + i % 13
    assert results[62]["error"]["type"] == "too_long"
    assert results[63]["output"] in ("yes", "no")
    assert results[64]["status"] == "failed"


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_tokenising_in_the_client_or_in_the_worker_gives_the_same_answers(
    vllm_mesh: Up, tmp_path: Path
) -> None:
    path = tmp_path / "greedy.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {"messages": [{"role": "user", "content": f"ünï {i}"}], "max_tokens": 12, "temperature": 0.0}
            )
            for i in range(20)
        )
    )
    answers: list[list[tuple[str, int]]] = []
    for where in ("client", "worker"):
        job = f"greedy-{where}"
        vllm_mesh.json("submit", str(path), "--job", job, "--tokenise", where)
        assert vllm_mesh.run("watch", job, "--timeout", "120", timeout=150).returncode == 0
        done = vllm_mesh.run("results", job, "--format", "jsonl")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        answers.append([(r["output"], r["usage"]["prompt_tokens"]) for r in rows])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_the_demo_makes_its_model_for_vllm_and_answers_with_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    # The weights as fetched by whoever came first; what vLLM reads is made of them here, as on a fresh machine.
    (cache / weights.FILE_NAME).symlink_to(weights.fetch_demo_weights())
    prompts = tmp_path / "prompts.jsonl"
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"messages": [question], "max_tokens": 12, "temperature": 0}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    prompts.write_text("".join(json.dumps({"custom_id": f"q{i}", **line}) + "\n" for i in range(3)))
    arguments = ("demo", "--engine", "vllm", "--prompts", str(prompts), "--json")
    done = headrace(*arguments, timeout=240, HEADRACE_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert "making the demo's model for vLLM" in done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["balanced"]) == (3, True)
    assert {"Paris" in sample["answer"] for sample in report["samples"]} == {True}
    # The chat template came along, with the system prompt that it adds.
    assert report["tokens_in"] == 3 * 37


@pytest.mark.llamacpp
@pytest.mark.timeout(300)
def test_a_stop_does_not_wait_for_prompts_that_llamacpp_reads(tmp_path: Path) -> None:
    """Sixteen long prompts take this engine half a minute, without a token; none of them may hold up a drain."""
    up = Up(tmp_path / "D", "--grace", "1", engine="llamacpp")
    try:
        lines = [json.dumps({"prompt": f"{i} " + "river " * 400, "max_tokens": 60}) for i in range(32)]
        path = tmp_path / "job.jsonl"
        path.write_text("\n".join(lines))
        up.json("submit", str(path), "--job", "long")
        deadline = time.monotonic() + 30
        while up.json("status", "long")["running"] < 16:
            assert time.monotonic() < deadline, up.json("status", "long")
        # Exit code 0: the worker ended by itself, within its grace and the margin after it.
        assert up.stop() == 0
        assert up.leftovers() == []
    finally:
        up.kill()


@pytest.mark.llamacpp
@pytest.mark.timeout(300)
def test_a_job_through_llamacpp(tmp_path: Path) -> None:
    up = Up(tmp_path / "D", engine="llamacpp")
    try:
        prompt = {
            "messages": [{"role": "user", "content": "What is 2 + 2?"}],
            "max_tokens": 8,
            "temperature": 0.0,
        }
        path = tmp_path / "job.jsonl"
        path.write_text("\n".join([json.dumps(prompt)] * 8 + [json.dumps({"prompt": "word " * 3_000})]))
        assert up.json("submit", str(path), "--job", "real")["submitted"] == 9
        assert up.run("watch", "real", "--timeout", "200", timeout=220).returncode == 3
        rows = up.json(
            "sql", "SELECT text, completion_tokens FROM outcomes WHERE job = 'real' AND status = 'ok'"
        )
        assert len({r["text"] for r in rows}) == 1
        assert rows[0]["text"].strip()
        failed = up.json("sql", "SELECT error_type FROM outcomes WHERE job = 'real' AND status = 'failed'")
        assert failed == [{"error_type": "too_long"}]
        assert up.json("audit", "real")["balanced"]
        assert up.stop() == 0
        assert up.leftovers() == []
    finally:
        up.kill()
