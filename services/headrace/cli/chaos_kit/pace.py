"""How long a job lasts: engines that only pretend to work are slowed down, so that there is time to break things.

A real engine takes the time that it takes. `echo` answers at once and `sim` as fast as its simulated machine: with
20,000 short items a run would be over before the third kill.
"""

from __future__ import annotations

from typing import Final

from headrace.cli.chaos_kit.load import Load, mean_tokens

SLOTS: Final = 64
"""Items that a slowed worker runs at once."""
WORKING: Final = 0.5
"""Share of the time that is left for work while parts of the mesh are down."""
_SIM_MEDIAN, _SIM_SIGMA, _SIM_STEP_S, _SIM_STEP_PER_ITEM_S = 128.0, 0.8, 0.0068, 0.00003
"""The defaults of the simulated machine."""


def engine_flags(engine: str, load: Load, *, seconds: float, workers: int, slots: int | None) -> list[str]:
    """Engine options (`NAME=VALUE`) with which `load` lasts about `seconds`; none for a real engine."""
    each_s = WORKING * seconds * (slots or SLOTS) * workers / max(1, load.items)
    if engine == "echo":
        return [f"delay_ms={each_s * 1000:.3f}"]
    if engine == "sim":
        tokens = mean_tokens(load.limits, median=_SIM_MEDIAN, sigma=_SIM_SIGMA)
        step_s = _SIM_STEP_S + _SIM_STEP_PER_ITEM_S * (slots or SLOTS)
        return [f"time_scale={min(1000.0, each_s / (tokens * step_s)):.4f}"]
    return []


def queue_bound(load: Load) -> int:
    """Bytes of the task and result streams: about a third of the job, so that the queue does fill up.

    Then the submitter lives through most of the run, and meets the faults too.
    """
    stored = load.size + 300 * load.items  # names, fingerprints and headers of each task
    return max(MIN_BOUND, stored // 3)


MIN_BOUND: Final = 256 << 10
