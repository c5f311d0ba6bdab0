"""The arithmetic of the `sim` engine: how long a step takes, and what a prompt's simulated answer is.

The defaults describe an 8B model in bf16 on one H100-class GPU. They are a roofline worked out from data
sheets, not a measurement: 16 GB of weights over 3.35 TB/s gives 4.8 ms for each decode step, to which 2 ms of
launch and scheduling are added; 16 GFLOP a token at half of the 990 dense TFLOP/s gives 30,000 prefill tokens/s
and 0.03 ms for each decoding sequence; a KV token of 32 layers x 8 heads x 128 x 2 x 2 bytes = 128 KiB, read at
70 % of the bandwidth, gives 0.056 µs; and the 52 GB that 80 x 0.9 GB leave hold 400,000 of them. Measure your own
GPU and set them: capacity planning is only as good as these numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from headrace.contracts.generation import Generation
from headrace.contracts.messages import Choice
from headrace.inference_worker.engines.checks import cut_at_stop
from headrace.inference_worker.engines.options import EngineOptions, Extras

# fmt: off
_WORDS: Final = (
    "water", "wheel", "gate", "channel", "stone", "river", "mill", "grain",
    "turn", "flow", "rise", "fall", "steady", "slow", "quick", "deep",
    "clear", "cold", "upper", "lower", "first", "last", "north", "south",
    "light", "dark", "old", "new", "small", "great", "open", "closed",
)
# fmt: on


class SimSettings(Struct, frozen=True, kw_only=True):
    """The simulated machine. Times in seconds, sizes in tokens; `time_scale` 1 is real time, 0 never sleeps."""

    prefill_tokens_per_s: float
    step_s: float
    step_per_seq_s: float
    step_per_kv_token_s: float
    capacity_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    output_median: float
    output_sigma: float
    time_scale: float
    seed: int
    poison: str = ""
    hang: str = ""
    freeze: str = ""
    segfault: str = ""
    oom_tokens: int = 0
    oom_always: bool = False
    fail_share: float = 0.0

    def step_seconds(self, *, prefill: int, decoding: int, kv_tokens: int) -> float:
        """Duration of one step: prefill tokens at their rate, and a + b·sequences + c·KV tokens if any decode."""
        seconds = prefill / self.prefill_tokens_per_s
        if decoding:
            seconds += self.step_per_seq_s * decoding + self.step_per_kv_token_s * kv_tokens
        return seconds + self.step_s


def read_settings(options: EngineOptions) -> SimSettings:
    """Settings from the options; raise `InvalidInput` for one that does not exist or is out of bounds."""
    x = Extras("sim", options.extra)
    settings = SimSettings(
        prefill_tokens_per_s=x.number("prefill_tokens_per_s", 30_000.0, minimum=1e-3),
        step_s=x.number("step_ms", 6.8) / 1000,
        step_per_seq_s=x.number("step_per_seq_ms", 0.03) / 1000,
        step_per_kv_token_s=x.number("step_per_kv_token_us", 0.056) / 1e6,
        capacity_tokens=x.integer("capacity_tokens", 400_000, minimum=1),
        max_num_seqs=options.slots or x.integer("max_num_seqs", 256, minimum=1),
        max_num_batched_tokens=x.integer("max_num_batched_tokens", 8192, minimum=1),
        max_model_len=options.context or x.integer("max_model_len", 8192, minimum=2),
        vocab_size=x.integer("vocab_size", 128_256, minimum=1, maximum=2**31),
        output_median=x.number("output_median", 128.0, minimum=1.0, maximum=1e6),
        output_sigma=x.number("output_sigma", 0.8, maximum=5.0),
        time_scale=x.number("time_scale", 1.0, maximum=1000.0),
        seed=options.seed,
        poison=x.text("poison"),
        hang=x.text("hang"),
        freeze=x.text("freeze"),
        segfault=x.text("segfault"),
        oom_tokens=x.integer("oom_tokens", 0),
        oom_always=x.flag("oom_always", default=False),
        fail_share=x.number("fail_share", 0.0, maximum=1.0),
    )
    # With `slots` or `context` given, their own names would be refused as unknown rather than as doubled.
    x.text("max_num_seqs")
    x.text("max_model_len")
    x.finish()
    return settings


def estimate_tokens(text: str) -> int:
    """Prompt tokens of a text: its UTF-8 bytes / 4, rounded up. It is sim's own tokenizer, and so exact here."""
    return max(1, -(-len(text.encode()) // 4))


def digest(text: str | Sequence[int]) -> int:
    """A stable 64-bit number for a prompt."""
    data = text if isinstance(text, str) else ",".join(map(str, text))
    return int.from_bytes(blake2b(data.encode(), digest_size=8).digest(), "big")


class Answer(Struct, frozen=True):
    """A simulated completion, known before it is run: its choice, and the tokens that it takes to make."""

    choice: Choice
    tokens: int


def answer(settings: SimSettings, prompt: int, params: Generation, max_tokens: int, which: int) -> Answer:
    """The `which`-th choice for a prompt digest: log-normal length capped at `max_tokens`, then cut at a stop string.

    The same (seed, prompt, parameters' seed, which) give the same answer on every machine.
    """
    seed = params.seed if params.seed is not None else settings.seed
    rng = random.Random(f"{seed}/{prompt}/{which}")
    wanted = round(settings.output_median * rng.lognormvariate(0.0, settings.output_sigma))
    wanted = max(wanted, params.min_tokens, 1)
    tokens = max_tokens if params.ignore_eos else min(wanted, max_tokens)
    reason = "length" if params.ignore_eos or wanted > max_tokens else "stop"
    # A stride that is coprime to the number of words walks through all of them: cheap, and prompts look different.
    at, stride = rng.randrange(len(_WORDS)), rng.randrange(1, len(_WORDS), 2)
    ids = [(at + k * stride) % len(_WORDS) for k in range(tokens)]
    text = " ".join(_WORDS[i] for i in ids)
    if not params.stop:
        return Answer(Choice(text=text, finish_reason=reason), tokens)
    cut, stopped = cut_at_stop(text, params.stop, include=params.include_stop_str_in_output)
    if stopped is None:
        return Answer(Choice(text=text, finish_reason=reason), tokens)
    # The stop string is only seen once the word that completes it has been made.
    end = text.find(stopped) + len(stopped)
    made = text.count(" ", 0, end) + (0 if text[end - 1] == " " else 1)
    return Answer(Choice(text=cut, finish_reason="stop", stop_reason=stopped), max(1, min(made, tokens)))
