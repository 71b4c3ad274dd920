"""Reports: what a page says of a run, that nothing in it is alive or secret, and how it opens in a browser."""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.folder import RunFolder
from agent.manifest import file_digest
from agent.report.curves import charts_of, thin
from agent.report.page import lift_bars, run_page, safe, visible
from agent.report.reading import read_run
from agent.report.writing import labels_of, write_reports
from agent.states import owner
from finetune.errors import FinetuneError, Problems
from tests.agent.calls import CPU
from tests.agent.reported import (
    HOSTILE,
    UNSEEN,
    Page,
    batch,
    manifest,
    metrics,
    rollout,
    state,
    write_run,
)


def page_of(folder: RunFolder, secrets: tuple[str, ...] = ()) -> Page:
    return Page(run_page(read_run(folder, "here"), secrets)[0])


def charts(page: Page) -> dict[str, dict[str, Any]]:
    return {
        chart["title"]: {line["name"]: line["points"] for line in chart["lines"]}
        for chart in page.payload["charts"]
    }


def test_a_report_answers_with_its_files_and_the_same_again(tmp_path: Path, command: Any) -> None:
    write_run(tmp_path / "run")
    answer, code = command("report", str(tmp_path / "run"))
    assert code == 0, answer
    assert [item["kind"] for item in answer["artifacts"]] == ["report", "picture"]
    for item, name in zip(answer["artifacts"], ("report.html", "report.png"), strict=True):
        assert item["path"] == str(tmp_path / "run" / name)
        assert item["sha256"] == file_digest(Path(item["path"]))
    assert Path(answer["artifacts"][1]["path"]).read_bytes().startswith(b"\x89PNG")
    assert (answer["warnings"], answer["run_dir"]) == ([], str(tmp_path / "run"))
    again, _ = command("report", str(tmp_path / "run"))
    assert again["artifacts"] == answer["artifacts"]


def test_a_page_says_what_the_run_was_and_what_came_of_it(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    for said in (
        "grpo-20260101-000000-aaaaaaaa succeeded",
        "held-out accuracy 0.25 → 0.75",
        "lift of accuracy +0.5 95 % interval +0.125 to +0.875",
        "better. 2 rows are better, 2 equal, 0 worse of 4 pairs",
        "peak memory 3 GiB most of 2 ranks",
        "time 1 h 0 min 2 attempts",
        "read 12 trained 7 held out 3 dropped: too_long 2 rows.jsonl:4, rows.jsonl:9",
        "of the trained ones truncated: answer 1 rows.jsonl:5",
        "read = trained + held out + dropped: it balances",
        "learning_rate 0.0001 user",
        "micro_batch_tokens 1024 plan",
        "source commit 0123456789abcdef",
        "torch 2.13.0",
        "few_steps the run takes 4 optimizer steps",
        "checkpoint_skipped step-3 is not whole",
        "succeeded 0 step 2 here, 2 x cpu num_gpus",
        "c" * 64,
        "is not there any more",
        "2 of 2 steps are in this file",
    ):
        assert said in page.text, said


def test_settings_that_somebody_chose_come_first(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run")).text
    places = [
        text.index(name) for name in ("learning_rate 0.0001", "micro_batch_tokens 1024", "seed 0 default")
    ]
    assert places == sorted(places)


def test_curves_hold_every_number_of_the_metrics(tmp_path: Path) -> None:
    found = charts(page_of(write_run(tmp_path / "run")))
    assert found["Loss"]["loss"] == [[1, 1.0], [2, 0.5], [3, 0.333333], [4, 0.25]]
    assert found["Held-out accuracy"] == {"held-out accuracy": [[0, 0.25], [4, 0.75]]}
    assert found["Reward"]["reward/numeric"] == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert set(found["Mismatch of sampler and trainer"]) == {"logp_gap_mean", "logp_gap_k3"}
    assert found["Peak memory per rank"]["rank 1"] == [[step, 2.0] for step in (1, 2, 3, 4)]
    assert found["Counts of a step"]["ledger/sampled"] == [[step, 4] for step in (1, 2, 3, 4)]
    assert "KL to the reference" not in found, "it is 0 throughout without a reference"


def test_a_metric_that_nobody_foresaw_has_a_chart_and_a_lost_number_leaves_a_gap(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [line | {"own/score": 3.0} for line in metrics()]
    lines[1] = lines[1] | {"loss": None, "non_finite": ["loss"]}
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = charts(page_of(folder))
    assert found["own/score"] == {"own/score": [[step, 3.0] for step in (1, 2, 3, 4)]}
    assert found["Loss"]["loss"][1] == [2, None]


def test_thinning_keeps_spikes_gaps_and_order() -> None:
    points: list[list[float | None]] = [[step, 1.0] for step in range(10_000)]
    points[5_000], points[7_000] = [5_000, 99.0], [7_000, -99.0]
    kept = thin(points, 100)
    assert len(kept) <= 100
    assert [5_000, 99.0] in kept
    assert [7_000, -99.0] in kept
    assert [point[0] for point in kept] == sorted({point[0] or 0 for point in kept})
    assert thin([[1, None], [2, 0.1234567891]], 10) == [[1, None], [2, 0.123457]]


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        status="failed",
        outputs=[],
        settings={"system_prompt": {"value": HOSTILE + UNSEEN, "source": "user"}},
        warnings=[{"hint_id": "few_steps", "text": HOSTILE}],
        error={
            "code": "verifier_failed",
            "hint_id": "verifier_failed",
            "message": HOSTILE + UNSEEN,
            "rank": 1,
            "traceback": HOSTILE,
            "evidence": {},
        },
    )
    answers = [rollout(0, 0, id="eval-0-0", text=HOSTILE)]
    for step in (0, 4):
        (folder.path / "rollouts" / f"eval-{step:06d}.jsonl").write_text(batch(step, answers, "eval"))
    text, _ = run_page(read_run(folder, "here"), ())
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2, "the payload and our own script"
    assert not [
        tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "link", "base", "form")
    ]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count("onerror=alert(1)") >= 4, "shown as it is"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\u200f]", text)
    assert "⟨U+001B⟩[31m⟨U+202E⟩drow" in page.text
    errors = [one["error"] for one in page.payload["rollouts"]["steps"][0]["rollouts"]]
    assert errors[3] == "late " + visible(HOSTILE + UNSEEN)


def test_a_page_needs_nothing_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    text, _ = run_page(read_run(write_run(tmp_path / "run"), "here"), ())
    page = Page(text)
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    sources = [
        attributes.get(name) for _, attributes in page.tags for name in ("src", "href", "data", "action")
    ]
    assert all(value.startswith("#") for value in sources if value), "links within the page alone"
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|eval\(", text)


def test_a_run_under_way_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    value = manifest(
        folder.path, status="running", result=None, ended=None, duration_s=None, exit_code=None, outputs=[]
    )
    folder.manifest.write_text(json.dumps(value))
    folder.state.write_text(json.dumps(state("running", step=2, **owner("here"))))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics()[:2]) + '{"step": 3, "lo')
    (folder.path / "events.jsonl").write_text(
        json.dumps({"time": 1.0, "kind": "evaluated", "step": 0, "accuracy": 0.25, "num_rows": 4}) + "\n"
    )
    page = page_of(folder)
    assert "aaaaaaaa running" in page.text
    assert "What went wrong" not in page.text
    assert "steps 2 of 4" in page.text
    assert "held-out accuracy 0.25 → –" in page.text
    assert charts(page)["Loss"]["loss"] == [[1, 1.0], [2, 0.5]]
    assert "The run has left no file of weights" in page.text
    assert "no JSON" not in page.text, "a last line half written is no damage"


def test_a_damaged_line_is_left_out_and_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    folder.metrics.write_text('{"step": 1, "loss": 1.0}\nnonsense\n{"step": 3, "loss": 0.5}\n')
    page = page_of(folder)
    assert charts(page)["Loss"]["loss"] == [[1, 1.0], [3, 0.5]]
    assert "metrics.jsonl: 1 lines are no JSON" in page.text


def test_a_failure_is_shown_with_its_hint(tmp_path: Path) -> None:
    error = {"code": "out_of_memory", "hint_id": "out_of_memory", "message": "CUDA out of memory", "rank": 1,
             "traceback": "Traceback (most recent call last):\n  boom", "evidence": {}}  # fmt: skip
    page = page_of(write_run(tmp_path / "run", status="failed", error=error, result=None, outputs=[]))
    assert "What went wrong: out_of_memory CUDA out of memory hint out_of_memory cause" in page.text
    assert "rank 1" in page.text
    assert "boom" in page.text


def test_of_a_lost_run_the_logs_tell_the_cause(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", status="running", result=None, outputs=[])
    folder.state.write_text(json.dumps(state("running")))
    folder.logs.mkdir()
    trace = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    (folder.logs / "rank0.log").write_text("starting\n" + trace)
    page = page_of(folder)
    assert "aaaaaaaa lost" in page.text
    assert "rank0.log, line 2: torch.OutOfMemoryError" in page.text
    assert "out_of_memory" in page.text


def test_a_folder_without_a_run_is_named(tmp_path: Path, command: Any) -> None:
    (tmp_path / "empty").mkdir()
    answer, code = command("report", str(tmp_path / "empty"))
    assert (code, answer["errors"][0]["code"]) == (3, "run_missing")
    assert not list((tmp_path / "empty").iterdir())


def test_runs_are_compared_by_figures_curves_lifts_and_what_differs(tmp_path: Path, command: Any) -> None:
    write_run(tmp_path / "a")
    slower = manifest(tmp_path / "b")["settings"] | {"learning_rate": {"value": 1e-5, "source": "user"}}
    write_run(
        tmp_path / "b", with_rollouts=False, run_id="grpo-b", settings=slower, packages={"torch": "2.12.0"}
    )
    answer, code = command("report", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a"))
    assert code == 0, answer
    kinds = [item["kind"] for item in answer["artifacts"]]
    assert kinds == ["report", "picture", "report", "picture", "comparison", "picture"]
    page = Page((tmp_path / "a" / "comparison.html").read_text())
    loss = next(chart for chart in page.payload["charts"] if chart["title"] == "loss")
    assert [line["name"] for line in loss["lines"]] == ["a", "b"]
    assert "learning_rate 0.0001 1e-05" in page.text
    assert "torch 2.13.0 2.12.0" in page.text
    assert "micro_batch_tokens" not in page.text, "the same in both"
    assert "a accuracy +0.5 (95 % interval +0.125 to +0.875)" in page.text
    links = [
        attributes["href"]
        for tag, attributes in page.tags
        if tag == "a" and ".html" in str(attributes["href"])
    ]
    assert links == ["report.html", "../b/report.html"]


def test_lifts_share_an_axis() -> None:
    lift = {
        "of": "accuracy",
        "mean": "+0.5",
        "interval": "",
        "numbers": {"mean": 0.5, "low": 0.0, "high": 1.0},
    }
    worse = lift | {"numbers": {"mean": -0.5, "low": -1.0, "high": 0.0}}
    first, second = lift_bars([lift, None, worse], ["x", "y", "z"])
    assert (first["zero"], first["low"], first["mean"], first["high"]) == (50, 50, 73, 96)
    assert (second["label"], second["low"], second["mean"], second["high"]) == ("z", 4, 27, 50)
    assert lift_bars([None], ["x"]) == []


def test_labels_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / place, with_rollouts=False), "here")
        for place in ("x/run", "y/run", "z")
    ]
    assert labels_of(runs[1:]) == ["run", "z"]
    assert labels_of(runs[:2]) == ["x/run", "y/run"]


def test_another_place_is_taken_and_no_foreign_file_written_over(tmp_path: Path, command: Any) -> None:
    folder = write_run(tmp_path / "run", with_rollouts=False)
    out = tmp_path / "elsewhere" / "mine.html"
    answer, code = command("report", str(folder.path), "--out", str(out))
    assert code == 0, answer
    assert out.exists()
    assert out.with_suffix(".png").exists()
    assert not (folder.path / "report.html").exists()
    assert command("report", str(folder.path), "--out", str(out))[1] == 0, "a report of ours is replaced"
    out.write_text("<p>notes of somebody")
    out.with_suffix(".png").write_bytes(b"a photo")
    answer, code = command("report", str(folder.path), "--out", str(out))
    assert (code, [error["code"] for error in answer["errors"]]) == (7, ["target_exists", "target_exists"])
    assert out.read_text() == "<p>notes of somebody"
    answer, code = command("report", str(folder.path), "--out", str(tmp_path / "page.txt"))
    assert (code, answer["errors"][0]["code"]) == (2, "bad_value")


def test_without_matplotlib_the_page_is_written_and_the_picture_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", with_rollouts=False)
    write_reports([folder], None, CPU)
    assert (folder.path / "report.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = write_reports([folder], None, CPU)
    assert [item["kind"] for item in answer.artifacts] == ["report"]
    assert [code for code, _ in answer.warnings] == ["missing_package"]
    assert "finetune-skills[report]" in answer.warnings[0][1]
    assert not (folder.path / "report.png").exists(), "an old picture would not be of this page"


def test_a_picture_is_drawn_of_any_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "$x_{" / "_run 名", with_rollouts=False)
    lines = [line | {"reward/$\\frac{": 1.0, "reward/_b": float(line["step"])} for line in metrics()]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = write_reports([folder], None, CPU)
    assert answer.warnings == []
    empty = write_run(tmp_path / "empty", with_rollouts=False)
    empty.metrics.unlink()
    assert write_reports([empty], None, CPU).warnings == []


def test_numbers_that_are_not_finite_and_odd_keys_are_safe() -> None:
    assert safe({1: float("nan"), "a\x00": (1.5, "\x1b")}, ()) == {"1": None, "a⟨U+0000⟩": [1.5, "⟨U+001B⟩"]}
    assert visible("tab\tline\r\nü 👩‍💻") == "tab\tline\nü 👩‍💻"


def test_the_charts_of_a_run_without_steps_are_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", with_rollouts=False)
    folder.metrics.unlink()
    (folder.path / "events.jsonl").unlink()
    assert charts_of(read_run(folder, "here")) == []


def test_problems_name_every_file_at_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", with_rollouts=False)
    (folder.path / "report.html").mkdir()
    with pytest.raises(Problems) as raised:
        write_reports([folder], None, CPU)
    assert [error.code for error in raised.value.errors] == ["target_exists"]
    with pytest.raises(FinetuneError) as missing:
        write_reports([RunFolder(tmp_path / "nowhere")], None, CPU)
    assert missing.value.code == "run_missing"
