"""Settings from `headrace.toml`, the environment and flags, in that order of rising precedence.

Every field can be set in all three: `[worker] engine = "sim"`, `HEADRACE_WORKER_ENGINE=sim`,
`--engine sim`. `HEADRACE_NATS_URL` is `url`. An unknown key is refused by name, since a setting that
is silently ignored is the most expensive kind.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from headrace.contracts.errors import InvalidInput, NotFound
from headrace.contracts.names import Token
from headrace.mesh.callee_settings import CalleeSettings, GatewaySettings, PolicySettings
from headrace.mesh.forge_settings import ForgeSettings, FunctionSettings

DEFAULT_DIR = ".headrace"
CONFIG_FILE = "headrace.toml"
CONFIG_ENV = "HEADRACE_CONFIG"
"""Names another file of settings."""
MESH_FILE = "mesh.json"
_ENV = "HEADRACE_"
_NOT_SETTINGS = {
    "HEADRACE_CONFIG",
    "HEADRACE_CRASH_AT",
    "HEADRACE_READY_FILE",
    "HEADRACE_CACHE",
    "HEADRACE_TRACE_ITEMS_PER_JOB",
}

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inference worker: which engine, how much at once."""

    function: Token = "generate"
    engine: Literal["echo", "sim", "llamacpp", "vllm"] = "echo"
    model: str | None = None
    """Path of a local model: a GGUF file (llamacpp) or a model folder (vllm)."""
    slots: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Items that run at once; 0 lets the engine decide."""
    context: Annotated[int, Meta(ge=0, le=16_777_216)] = 0
    """Longest prompt + completion in tokens; 0 lets the engine decide."""
    threads: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """CPU threads of the engine; 0 lets the engine decide."""
    high_water: Annotated[float, Meta(gt=0, le=4)] = 1.0
    """Share of the engine's token capacity up to which work is pulled."""
    low_water: Annotated[float, Meta(ge=0, le=4)] = 0.85
    """Share below which pulling starts again."""
    engine_options: dict[str, str] = {}
    """Settings of the engine itself, by its own names."""
    name: Token | None = None
    """Name in reports and results; by default made of host, process and chance."""
    token_timeout_s: Seconds = 120.0
    """Running items and no token for this long: the engine is taken for dead."""
    functions: Annotated[str, Meta(max_length=4_096)] = ""
    """Functions over rows to serve, instead of `function`: `pkg.mod` for all of a module, `pkg.mod:name`, or built-in
    ones by name (`embed`, `classify`, `generate`); several with commas.
    """


class CompletionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The completion service: where results land and what reading may cost."""

    database: str = ""
    """Path of the DuckDB file; by default `data/headrace.duckdb` under the mesh's folder."""
    batch_rows: Annotated[int, Meta(ge=1, le=20_000)] = 2_000
    """Rows landed in one transaction at most."""
    batch_wait_ms: Annotated[int, Meta(ge=0, le=10_000)] = 20
    """How long a transaction waits to fill, in milliseconds."""
    query_timeout_s: Seconds = 10.0
    query_max_rows: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    memory_limit: Annotated[str, Meta(pattern=r"^\d+(KB|MB|GB)$")] = "128MB"
    """DuckDB's own memory limit."""


class AgentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents: how often a message is tried, how far it may travel, how much recording may wait."""

    message_tries: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """Deliveries of a message before it becomes a dead letter without being handled again."""
    retry_s: Seconds = 1.0
    """Pause after a first failed try; it doubles with each further one, up to `retry_cap_s`."""
    retry_cap_s: Seconds = 30.0
    max_hops: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """Messages that may follow from one another before the conversation is ended."""
    patience_s: Seconds = 60.0
    """How long an agent waits for room in a mailbox; after it the mail is undelivered, and the agent is told."""
    capture_records: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Records of what agents did that wait for the broker; further ones are dropped and counted."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a process of the mesh can be told."""

    url: Annotated[str, Meta(max_length=2_048)] = ""
    """Address of the broker, `nats://host:port` (several with commas)."""
    dir: Annotated[str, Meta(max_length=4_096)] = DEFAULT_DIR
    """Folder of a local mesh."""
    prefix: Token = "hr"
    """First token of every subject."""
    tenant: Token = "default"
    durability: Literal["safe", "relaxed"] = "safe"
    """What an ack of the broker promises: `safe` = on disk (or on three nodes), `relaxed` = in the page cache."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    ack_wait_s: Annotated[float, Meta(ge=0.5, le=3_600)] = 30.0
    """Lease of a task or result: unrenewed for this long, it goes to another worker."""
    max_tries: Annotated[int, Meta(ge=1, le=1_000)] = 5
    """Deliveries of a task before it becomes `dead` without running again."""
    max_bytes: Annotated[int, Meta(ge=-1)] = -1
    """Bound of the task and result streams in bytes each; full streams refuse. -1 = the broker's own."""
    mailbox_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Messages of one sender that one lane of an agent's mailbox holds; more are refused, and the sender is told."""
    large_item_bytes: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 524_288
    """A task with more bytes than this has its prompt in the object store, and so has one too large for a message."""
    max_item_bytes: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 32_000_000
    """Most bytes that a task or a result may have; not less than `large_item_bytes`."""
    creds: str | None = None
    """Path of a NATS credentials file."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    grace_s: Annotated[float, Meta(ge=0, le=3_600)] = 20.0
    """How long a stop waits for running work."""
    worker: WorkerSettings = WorkerSettings()
    completion: CompletionSettings = CompletionSettings()
    gateway: GatewaySettings = GatewaySettings()
    agent: AgentSettings = AgentSettings()
    policy: PolicySettings = PolicySettings()
    """Who may call what: rules, of which the first that fits decides."""
    callees: dict[Token, CalleeSettings] = {}
    """What can be called, by name."""
    forge: ForgeSettings = ForgeSettings()
    functions: dict[Token, FunctionSettings] = {}
    """How single functions over rows run, by name."""

    def __post_init__(self) -> None:
        if self.max_item_bytes < self.large_item_bytes:
            msg = (
                f"max_item_bytes {self.max_item_bytes} is less than large_item_bytes {self.large_item_bytes}"
            )
            raise ValueError(msg)
        for number, rule in enumerate(self.policy.rules, 1):
            if not rule.callee.endswith("*") and rule.callee not in (*self.callees, "generate"):
                msg = f"policy.rules: rule {number} names callee {rule.callee!r}, which is not declared"
                raise ValueError(msg)


_SECTIONS = {
    "worker": WorkerSettings,
    "completion": CompletionSettings,
    "gateway": GatewaySettings,
    "agent": AgentSettings,
    "policy": PolicySettings,
    "forge": ForgeSettings,
}
"""Sections of plain settings; `[callees.NAME]` and `[functions.NAME]` stand beside them."""
_IN_FILES_ONLY = ("policy", "callees", "functions")
"""Sections that no flag and no environment variable can give."""


def mesh_dir(explicit: str | Path | None = None) -> Path:
    """The folder of the local mesh: as given, else `HEADRACE_DIR`, else `./.headrace`."""
    return Path(explicit or os.environ.get("HEADRACE_DIR") or DEFAULT_DIR)


def load_settings(
    dir: str | Path | None = None,  # noqa: A002  (the name users know from --dir)
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    need_url: bool = True,
) -> Settings:
    """Return the settings in force.

    `flags` has dotted keys (`worker.engine`); None values count as not given. The file is
    `headrace.toml` in the mesh's folder, else in the current one. Raise `InvalidInput` naming the key
    that is wrong and where it came from; `NotFound` if `need_url` and no mesh can be found.
    """
    env = os.environ if environ is None else environ
    folder = mesh_dir(dir)
    merged: dict[str, Any] = {}
    explicit = env.get(CONFIG_ENV)
    for path in (Path(explicit),) if explicit else (folder / CONFIG_FILE, Path(CONFIG_FILE)):
        if explicit or path.is_file():
            merged = _read_toml(path)
            break
    _merge_env(merged, env)
    for key, value in (flags or {}).items():
        if value is not None:
            _put(merged, key, value)
    merged["dir"] = str(folder)
    if not merged.get("url") and need_url:
        merged["url"] = _url_of(folder)
    return _convert(merged)


def _convert(merged: dict[str, Any]) -> Settings:
    try:
        return msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as e:
        msg = f"setting is wrong: {e}"
        raise InvalidInput(msg, code="invalid_setting") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        msg = f"cannot read {path}: {e}"
        raise InvalidInput(msg, code="invalid_setting") from None
    _check_names(data, str(path))
    return data


def _check_names(data: dict[str, Any], where: str) -> None:
    for key, value in data.items():
        if key not in Settings.__struct_fields__:
            msg = f"unknown setting {key!r} in {where}: known are {', '.join(Settings.__struct_fields__)}"
            raise InvalidInput(msg, field=key, code="invalid_setting")
        if key in _SECTIONS and isinstance(value, dict):
            known = _SECTIONS[key].__struct_fields__
            for name in cast("dict[str, Any]", value):
                if name not in known:
                    msg = f"unknown setting {key}.{name} in {where}: known are {', '.join(known)}"
                    raise InvalidInput(msg, field=f"{key}.{name}", code="invalid_setting")


def _merge_env(merged: dict[str, Any], env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name.startswith(_ENV) or name in _NOT_SETTINGS or not value:
            continue
        key = name[len(_ENV) :].lower()
        if key == "nats_url":
            key = "url"
        section, _, rest = key.partition("_")
        if section in _SECTIONS:
            if (
                section in _IN_FILES_ONLY
                or rest not in _SECTIONS[section].__struct_fields__
                or rest == "engine_options"
            ):
                msg = f"environment variable {name} names no setting that the environment can give"
                raise InvalidInput(msg, field=name, code="invalid_setting")
            _put(merged, f"{section}.{rest}", value)
        elif key in Settings.__struct_fields__ and key not in _IN_FILES_ONLY:
            _put(merged, key, value)
        else:
            msg = f"environment variable {name} names no setting"
            raise InvalidInput(msg, field=name, code="invalid_setting")


def _put(merged: dict[str, Any], dotted: str, value: object) -> None:
    section, _, name = dotted.partition(".")
    if name:
        merged[section] = {**merged.get(section, {}), name: value}
    else:
        merged[section] = value


class MeshFile(Struct, kw_only=True):
    """`mesh.json` in the folder of a local mesh: where its broker is."""

    url: str
    port: int
    durability: str = "safe"
    engine: str = ""
    function: str = "generate"
    pid: int = 0


def read_mesh_file(folder: Path) -> MeshFile | None:
    """What `headrace up` wrote in `folder`, or None."""
    try:
        return msgspec.json.decode((folder / MESH_FILE).read_bytes(), type=MeshFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _url_of(folder: Path) -> str:
    found = read_mesh_file(folder)
    if found is None:
        msg = (
            f"no mesh found in {folder}: start one with `headrace up`, or say where it is with --dir, --url "
            "or HEADRACE_NATS_URL"
        )
        raise NotFound(msg, code="no_mesh")
    return found.url
