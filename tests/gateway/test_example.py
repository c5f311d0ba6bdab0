"""The example of a headrace.toml, and those in the page about the gateway, are settings that are taken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.mesh.callee_settings import (
    CalleeSettings,
    GatewaySettings,
    PolicyRule,
    PolicySettings,
    PriceSettings,
    ResolverSettings,
)
from headrace.mesh.settings import load_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "headrace.toml"
PAGE = ROOT / "docs" / "gateway.md"


def test_the_example_is_taken_and_names_every_setting(tmp_path: Path) -> None:
    text = EXAMPLE.read_text("utf-8")
    (tmp_path / "headrace.toml").write_text(text)
    settings = load_settings(tmp_path, need_url=False, environ={})
    assert set(settings.callees) == {"llm", "search", "tickets", "pay", "summarise"}
    assert {c.kind for c in settings.callees.values()} == {"openai", "http", "function"}
    plain: dict[str, Any] = tomllib.loads(text)
    callees = plain["callees"].values()
    for struct, tables in (
        (GatewaySettings, [plain["gateway"]]),
        (CalleeSettings, callees),
        (PriceSettings, [c["price"] for c in callees if "price" in c]),
        (ResolverSettings, [c["resolver"] for c in callees if "resolver" in c]),
        (PolicySettings, [plain["policy"]]),
        (PolicyRule, plain["policy"]["rules"]),
    ):
        named = {name for table in tables for name in table}
        assert named == set(struct.__struct_fields__), struct.__name__


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
def test_what_the_page_shows_is_taken(block: str, tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(block)
    assert load_settings(tmp_path, need_url=False, environ={}).callees


def test_the_page_names_what_there_is() -> None:
    """Each path that it links to exists, and each metric that the code reports stands there."""
    text = PAGE.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / link).exists(), link
    code = (ROOT / "services/headrace/gateway/telemetry.py").read_text("utf-8")
    names = re.findall(r'metrics\.(?:count|record|observe)\(\s*"([^"]+)"', code)
    assert len(names) == 8
    for name in names:
        short = name.removeprefix("headrace.calls.in_doubt")
        assert f"`{short or name}`" in text, name
