"""Continuous batching in miniature: what `sim` steps through. No clock and no event loop in here.

Admission is by whole size (prompt + max_tokens), so nothing that was admitted is ever put back; it is first
come first served within a priority, so an item that does not fit holds those behind it, as in vLLM. Each
step spends its token budget on the sequences that decode (one token each) and the rest on prefill, in chunks.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final

from headrace.inference_worker.engines.sim_model import SimSettings

WAITING, PREFILL, DECODE, GONE = range(4)


class Sequence:
    """One choice of one item on its way through the engine. Sizes in tokens."""

    __slots__ = ("left", "order", "owner", "prompt", "remaining", "size", "started", "state")

    def __init__(
        self, owner: object, prompt: int, max_tokens: int, remaining: int, order: tuple[int, int]
    ) -> None:
        self.owner = owner
        self.prompt = prompt
        self.size = prompt + max_tokens
        self.remaining = remaining
        self.order = order
        self.left = prompt
        self.started = 0
        self.state = WAITING

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order


class Step:
    """What one step did: prefill tokens, sequences decoding, KV tokens held, and who finished."""

    __slots__ = ("decoding", "finished", "kv_tokens", "prefill", "running")

    def __init__(
        self, prefill: int, decoding: int, kv_tokens: int, running: int, finished: list[Sequence]
    ) -> None:
        self.prefill = prefill
        self.decoding = decoding
        self.kv_tokens = kv_tokens
        self.running = running
        self.finished = finished


class Scheduler:
    """Sequences waiting, in prefill and decoding; `step()` advances all by one. A step costs the time of what
    changes in it, not of the batch: decoding sequences sit in a heap ordered by the step at which they end.
    """

    def __init__(self, settings: SimSettings) -> None:
        self._settings: Final = settings
        self._waiting: list[Sequence] = []
        self._prefill: deque[Sequence] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._orders = 0
        self.steps = 0
        self.reserved = 0
        self.kv_tokens = 0
        self.tokens = 0
        self.decoding = 0
        self.waiting = 0
        self._in_prefill = 0

    @property
    def running(self) -> int:
        """Sequences that hold KV cache."""
        return self.decoding + self._in_prefill

    def add(self, owner: object, prompt: int, max_tokens: int, remaining: int, priority: int) -> Sequence:
        """Queue a sequence that will make `remaining` tokens; it starts at a step boundary."""
        self._orders += 1
        seq = Sequence(owner, prompt, max_tokens, remaining, (priority, self._orders))
        heappush(self._waiting, seq)
        self.waiting += 1
        return seq

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence wherever it is; what it held is free at once."""
        state, seq.state = seq.state, GONE
        if state == WAITING:
            self.waiting -= 1
        elif state != GONE:
            self._release(seq, state)

    def step(self) -> Step:
        """Admit what fits, run one step, and return what it did."""
        self._admit()
        self.steps += 1
        decoding = self.decoding
        budget = max(self._settings.max_num_batched_tokens - decoding, 0)
        self.tokens += decoding
        self.kv_tokens += decoding
        finished = self._finish_due()
        prefill = self._prefill_chunks(budget, finished)
        running = self.running + len(finished)
        return Step(prefill, decoding, self.kv_tokens, running, finished)

    def _admit(self) -> None:
        limit, capacity = self._settings.max_num_seqs, self._settings.capacity_tokens
        while self._waiting:
            seq = self._waiting[0]
            if seq.state == GONE:
                heappop(self._waiting)
                continue
            if self.running >= limit or self.reserved + seq.size > capacity:
                return
            heappop(self._waiting)
            self.waiting -= 1
            self.reserved += seq.size
            seq.state = PREFILL
            self._in_prefill += 1
            self._prefill.append(seq)

    def _finish_due(self) -> list[Sequence]:
        finished: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self.steps:
            seq = heappop(self._ends)[2]
            if seq.state == DECODE:
                self._end(seq, finished)
        return finished

    def _prefill_chunks(self, budget: int, finished: list[Sequence]) -> int:
        spent = 0
        while self._prefill and spent < budget:
            seq = self._prefill[0]
            if seq.state == GONE:
                self._prefill.popleft()
                continue
            chunk = min(seq.left, budget - spent)
            spent += chunk
            seq.left -= chunk
            self.kv_tokens += chunk
            if seq.left:
                break
            # The last chunk of a prompt gives the first token, in the same step.
            self._prefill.popleft()
            self._in_prefill -= 1
            seq.state = DECODE
            seq.started = self.steps
            self.decoding += 1
            self.tokens += 1
            self.kv_tokens += 1
            if seq.remaining <= 1:
                self._end(seq, finished)
            else:
                heappush(self._ends, (self.steps + seq.remaining - 1, seq.order[1], seq))
        return spent

    def _end(self, seq: Sequence, finished: list[Sequence]) -> None:
        seq.state = GONE
        self._release(seq, DECODE)
        finished.append(seq)

    def _release(self, seq: Sequence, state: int) -> None:
        self.reserved -= seq.size
        if state == DECODE:
            self.decoding -= 1
            self.kv_tokens -= seq.prompt + 1 + self.steps - seq.started
        else:
            self._in_prefill -= 1
            self.kv_tokens -= seq.prompt - seq.left
