"""What no pipeline may be: checked whole before anything is stored, each error with its stage and field."""

from __future__ import annotations

from headrace.contracts.errors import HeadraceError, InvalidInput
from headrace.contracts.names import check_token
from headrace.contracts.pipeline import PipelineSpec, StageSpec
from headrace.contracts.pipeline_paths import ITEM, ROOTS, ROWS, named, parse_path, parse_template


def check_pipeline(spec: PipelineSpec) -> None:
    """Raise `InvalidInput` naming stage and field for what no pipeline can be."""
    names: set[str] = set()
    jobs: set[str] = set()
    for number, stage in enumerate(spec.stages):
        if stage.name in names:
            raise _wrong(stage, "name", "another stage has this name")
        job = spec.job_of(stage)
        try:
            check_token("job", job)
        except HeadraceError as e:
            raise _wrong(stage, "job", str(e)) from None
        if job in jobs:
            raise _wrong(stage, "job", f"another stage has the job {job}")
        if number == 0:
            _check_first(stage)
        else:
            if stage.after is not None and stage.after not in names:
                raise _wrong(stage, "from", f"{stage.after!r} is no stage before this one")
            _check_fed(stage)
            if stage.collect == "parent" and not _fans_out(spec, number):
                raise _wrong(stage, "collect", "'parent' needs a stage with each before it: use true")
        names.add(stage.name)
        jobs.add(job)


def _check_first(stage: StageSpec) -> None:
    for name in ("after", "row", "prompt", "chat", "system", "each", "collect", "where", "keep"):
        if getattr(stage, name):
            what = "from" if name == "after" else name
            raise _wrong(stage, what, "the first stage takes the lines of the input as they are")


def _check_fed(stage: StageSpec) -> None:
    forms = [name for name in ("row", "prompt", "chat") if getattr(stage, name) is not None]
    asked = [name for name in forms if name != "row"]
    if len(asked) > 1 or (len(forms) > 1 and not stage.collect):
        raise _wrong(stage, forms[-1], f"takes one of row, prompt, chat: got {' and '.join(forms)}")
    if stage.system is not None and stage.chat is None:
        raise _wrong(stage, "system", "stands beside chat only")
    for name in ("each", "where", "keep"):
        if stage.collect and getattr(stage, name):
            raise _wrong(stage, name, "does not go with collect")
    roots = ROOTS if stage.each is None else (ITEM, *ROOTS)
    rows = stage.row.values() if isinstance(stage.row, dict) else [stage.row] if stage.row else []
    paths = [("where", text) for text in (stage.where,) if text is not None]
    paths += [("keep", text) for _, text in named(stage.keep)] + [("row", text) for text in rows]
    for name, text in paths:
        _path(stage, name, text, roots)
    if stage.each is not None:
        _path(stage, "each", stage.each, ROOTS)
    kept = [name for name, _ in named(stage.keep)]
    if len(set(kept)) < len(kept):
        raise _wrong(
            stage,
            "keep",
            'two fields would have the same name: give them names, as { title = "value.title" }',
        )
    for name in ("prompt", "chat", "system"):
        text = getattr(stage, name)
        if text is not None:
            try:
                parse_template(text, (ROWS,) if stage.collect else roots)
            except InvalidInput as e:
                raise _wrong(stage, name, str(e)) from None


def _fans_out(spec: PipelineSpec, number: int) -> bool:
    """Whether there is a fan-out before stage `number`, with nothing collected in between."""
    at = spec.parent_of(number)
    while at is not None and not spec.stages[at].collect:
        if spec.stages[at].each is not None:
            return True
        at = spec.parent_of(at)
    return False


def _path(stage: StageSpec, name: str, text: str, roots: tuple[str, ...]) -> None:
    try:
        parse_path(text, roots)
    except InvalidInput as e:
        raise _wrong(stage, name, str(e)) from None


def _wrong(stage: StageSpec, name: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"stage {stage.name}, {name}: {why}", field=f"stage.{stage.name}.{name}", code="invalid_pipeline"
    )
