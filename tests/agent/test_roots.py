"""The folders that tools may touch: every path of a call, of its config file and of a run's plan is held to them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent import tools
from agent.roots import Roots
from tests.agent.calls import TINY, Caller, Standin, codes


@pytest.fixture
def outside(tmp_path: Path, roots: Roots) -> Path:
    """Return a folder beside the root; the root holds links to it and a rows.jsonl of its own."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    (folder / "verifier.py").write_text("def score(completion): return 1.0\n")
    (roots.first / "rows.jsonl").write_text((folder / "rows.jsonl").read_text())
    (roots.first / "link").symlink_to(folder)
    (roots.first / "link.jsonl").symlink_to(folder / "rows.jsonl")
    (roots.first / "mixed").mkdir()
    (roots.first / "mixed" / "rows.jsonl").symlink_to(folder / "rows.jsonl")
    return folder


BASE = {"model": "builtin:tiny", "data": ["rows.jsonl"], "device": "cpu"}


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("sft", "data", ["OUTSIDE/rows.jsonl"]),
        ("sft", "data", ["OUTSIDE/rows.jsonl:0.5"]),
        ("sft", "data", ["../outside/rows.jsonl"]),
        ("sft", "data", ["rows.jsonl", "link.jsonl"]),
        ("sft", "data", ["link.jsonl:0.5"]),
        ("sft", "data", ["link/rows.jsonl"]),
        ("sft", "data", ["mixed"]),
        ("sft", "data", ["a/../../outside"]),
        ("sft", "data", ["no/../../such"]),
        ("sft", "eval_data", ["OUTSIDE/rows.jsonl"]),
        ("sft", "model", "OUTSIDE"),
        ("sft", "model", "~/model"),
        ("sft", "model", "link"),
        ("sft", "out", "OUTSIDE/run"),
        ("sft", "out", "link/run"),
        ("sft", "out", "../run"),
        ("sft", "domain", "OUTSIDE/domain.py"),
        ("sft", "chat_template", "OUTSIDE/t.jinja"),
        ("sft", "init_adapter", "OUTSIDE"),
        ("sft", "profile", "OUTSIDE/profile.yaml"),
        ("grpo", "verifier", ["exact", "OUTSIDE/verifier.py:score:0.5"]),
        ("grpo", "verifier_args", ["schema=OUTSIDE/schema.json"]),
        ("grpo", "replay", "OUTSIDE"),
        ("grpo", "vllm_python", "OUTSIDE/python"),
        ("grpo", "vllm_args", ["chat-template=OUTSIDE/t.jinja"]),
    ],
)
@pytest.mark.parametrize("by_config", [False, True], ids=["as argument", "in a config file"])
def test_settings_that_lead_out_of_the_roots_are_refused(
    call_tool: Caller, roots: Roots, outside: Path, method: str, name: str, value: Any, by_config: bool
) -> None:
    bad = json.loads(json.dumps(value).replace("OUTSIDE", str(outside)))
    given = {"method": method, "settings": BASE | {name: bad}}
    if by_config:
        (roots.first / "c.yaml").write_text(json.dumps({"method": method, **BASE, name: bad}))
        given = {"config": "c.yaml"}
    answer = call_tool("ft_plan", given)
    assert codes(answer) == ["path_outside_roots"], answer["summary"]
    assert tools.exit_code(answer) == 3
    error = answer["errors"][0]
    assert (error["evidence"]["setting"], error["evidence"]["roots"]) == (name, [str(roots.first)])
    assert not list(outside.glob("run*"))


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("ft_plan", {"config": "OUTSIDE/c.yaml"}),
        ("ft_plan", {"config": "link/c.yaml"}),
        ("ft_status", {"run": "OUTSIDE"}),
        ("ft_status", {"run": "../outside"}),
        ("ft_status", {"run": "link"}),
        ("ft_logs", {"run": "link/x"}),
        ("ft_stop", {"run": "OUTSIDE"}),
        ("ft_resume", {"run": "OUTSIDE"}),
        ("ft_explain_error", {"what": "OUTSIDE/rows.jsonl"}),
        ("ft_explain_error", {"what": "/no/such/file"}),  # no telling whether it is there
        ("ft_explain_error", {"what": "link.jsonl"}),
        ("ft_evaluate", {"method": "sft", "settings": BASE, "adapter": "OUTSIDE"}),
        ("ft_report", {"run": ["OUTSIDE"]}),
    ],
)
def test_arguments_that_lead_out_of_the_roots_are_refused(
    call_tool: Caller, outside: Path, tool: str, arguments: Any
) -> None:
    answer = call_tool(tool, json.loads(json.dumps(arguments).replace("OUTSIDE", str(outside))))
    assert codes(answer)[0] == "path_outside_roots", answer["summary"]


def test_what_a_run_inside_can_read_and_write_must_lie_inside_too(
    call_tool: Caller, ended: Path, outside: Path, home: Path
) -> None:
    assert codes(call_tool("ft_export", run="run", to=str(outside / "merged"))) == ["path_outside_roots"]
    assert codes(call_tool("ft_generate", run="run", prompts=str(outside / "rows.jsonl"))) == [
        "path_outside_roots"
    ]
    plan = json.loads((ended / "plan.json").read_text())
    plan["settings"]["data"]["value"] = [str(outside / "rows.jsonl")]
    (ended / "plan.json").write_text(json.dumps(plan))
    for tool in ("ft_resume", "ft_evaluate", "ft_export"):
        assert codes(call_tool(tool, run="run")) == ["path_outside_roots"]
    (home / "plans").mkdir(parents=True, exist_ok=True)
    (home / "plans" / f"{plan['plan_id']}.json").write_text(json.dumps(plan))
    assert codes(call_tool("ft_start", plan=plan["plan_id"])) == ["path_outside_roots"]


def test_a_run_known_by_its_id_is_refused_where_its_folder_lies_outside(
    call_tool: Caller, standin: Standin, outside: Path, home: Path
) -> None:
    flags = [*TINY, "--data", str(outside / "rows.jsonl"), "--out", str(outside / "run")]
    answer, code = standin("run", *flags)
    assert code == 0
    assert codes(call_tool("ft_status", run=answer["run_id"])) == ["path_outside_roots"]


def test_names_and_paths_inside_are_no_matter(call_tool: Caller, roots: Roots, outside: Path) -> None:
    (roots.first / "inner.jsonl").symlink_to(roots.first / "rows.jsonl")
    for data in (["inner.jsonl"], ["./rows.jsonl"], [str(roots.first / "rows.jsonl:0.5")]):
        answer = call_tool("ft_plan", {"method": "sft", "settings": BASE | {"data": data, "out": "a/b"}})
        assert answer["ok"], answer["summary"]
    named = BASE | {"data": ["someone/rows"], "model": "someone/model"}
    assert "path_outside_roots" not in codes(call_tool("ft_plan", {"method": "sft", "settings": named}))
    builtin = {"model": "builtin:tiny", "data": ["builtin:arithmetic"], "device": "cpu"}
    assert call_tool("ft_plan", {"method": "sft", "settings": builtin})["ok"]
    assert codes(call_tool("ft_status", run="no-such-run")) == ["run_missing"]


def test_a_pipe_is_refused_for_reading_it_might_never_end(call_tool: Caller, roots: Roots) -> None:
    os.mkfifo(roots.first / "rows.jsonl")
    for given in ({"config": "rows.jsonl"}, {"method": "sft", "settings": BASE}):
        assert codes(call_tool("ft_plan", given)) == ["bad_path"]


def test_roots_are_folders_after_every_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "alias").symlink_to(real)
    roots = Roots.of([tmp_path / "alias", real])
    assert roots.folders == (real,)
    assert roots.hold(tmp_path / "alias" / "new" / "file")
    assert not roots.hold(tmp_path / "realistic")  # the beginning of a name is no folder
    assert not roots.hold(real / "..")
    with pytest.raises(Exception, match="is no folder"):
        Roots.of([tmp_path / "none"])


def test_relative_paths_begin_at_the_first_root_wherever_the_server_stands(
    call_tool: Caller, roots: Roots, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    answer = call_tool("ft_plan", {"method": "sft", "settings": BASE})
    assert answer["ok"], answer["summary"]
    assert answer["data"]["settings"]["data"]["value"] == [str(roots.first / "rows.jsonl")]
    assert os.path.dirname(answer["data"]["settings"]["out"]["value"]) == str(roots.first / "runs")


def test_a_link_behind_a_link_that_stays_inside_is_found(
    call_tool: Caller, ended: Path, roots: Roots, outside: Path
) -> None:
    shown = call_tool("ft_logs", run="run")
    assert shown["ok"], shown["summary"]
    (ended / "logs").rename(roots.first / "elsewhere")
    (ended / "logs").symlink_to(roots.first / "elsewhere")
    (roots.first / "elsewhere" / "again").symlink_to(ended)  # a circle ends
    assert call_tool("ft_logs", run="run")["ok"]
    (roots.first / "elsewhere" / "rank0.log").unlink(missing_ok=True)
    (roots.first / "elsewhere" / "rank0.log").symlink_to(outside / "rows.jsonl")
    assert codes(call_tool("ft_logs", run="run")) == ["path_outside_roots"]


def test_a_failed_run_outside_is_not_explained_by_its_id(
    call_tool: Caller, standin: Standin, outside: Path
) -> None:
    flags = [*TINY, "--data", str(outside / "rows.jsonl"), "--out", str(outside / "run")]
    answer, code = standin("run", *flags, how="crash:CUDA out of memory")
    assert code == 8
    assert codes(call_tool("ft_explain_error", what=answer["run_id"])) == ["path_outside_roots"]
    assert call_tool("ft_explain_error", what="RuntimeError: in /some/where: CUDA out of memory")["ok"]


def test_a_job_that_was_started_outside_is_neither_shown_nor_ended(
    call_tool: Caller, standin: Standin, roots: Roots, outside: Path
) -> None:
    argv = ["check-data", *TINY, "--data", "rows.jsonl", "--detach"]
    for cwd, expected in ((outside, ["path_outside_roots"]), (roots.first, [])):
        answer, code = standin(*argv, how="checks:0.1", cwd=cwd)
        assert code == 0
        job_id = answer["data"]["job_id"]
        for tool in ("ft_status", "ft_stop"):
            assert codes(call_tool(tool, run=job_id)) == expected


@pytest.mark.parametrize("name", ["data", "model", "out", "init_adapter"])
def test_text_that_no_path_can_be_is_refused_and_no_bug(
    call_tool: Caller, roots: Roots, outside: Path, name: str
) -> None:
    for odd, expected in (("/a\x00b", "bad_path"), ("a\ud800/../../outside", "path_outside_roots")):
        (roots.first / "c.json").write_text(json.dumps({"method": "sft", **BASE, name: odd}))
        assert codes(call_tool("ft_plan", config="c.json")) == [expected]
